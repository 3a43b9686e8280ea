"""Evaluation of trained weights outside a training run: the weights, the images and the result."""
