"""Pure-function image models over pytrees. Imports jax alone."""
