"""Layers that are fast inside a loop, forward and backward: convolution, batch norm, pooling, the head."""
