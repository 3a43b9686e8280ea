"""The commands preprocess-imagenet and inspect-shards, and what all commands share."""
