"""Layers whose forward and backward passes are fast inside a loop: convolution, batch norm, pooling and the head."""
