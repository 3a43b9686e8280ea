"""Evaluations outside of a training: whose weights, on which images, and what came of it."""
