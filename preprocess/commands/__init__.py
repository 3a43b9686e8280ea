"""The commands preprocess-imagenet and inspect-shards, and code that all commands share."""
