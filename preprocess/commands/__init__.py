"""The commands preprocess-imagenet and inspect-shards, and code shared by all commands."""
