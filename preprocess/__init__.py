"""Offline preprocessing: images into packed-pixel shards, and the reader of those shards. Never imports jax."""
