"""Evaluations outside of a training: the weights, the images and the result."""
