"""Decodes image files into RGB images of the size that shards store, with limits on time and memory."""
