"""Offline preprocessing: converts images to shards of packed pixels, and reads such shards. Never imports jax."""
