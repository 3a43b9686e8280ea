"""Layers that stay fast inside the loop, forward and backward: convolution, batch norm, pooling, the head."""
