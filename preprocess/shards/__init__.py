"""The shard format: its files, and the code that reads and verifies them."""
