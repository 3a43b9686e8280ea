"""Image models as pure functions over pytrees. This package depends only on jax and NumPy."""
