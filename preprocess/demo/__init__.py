"""A small synthetic data set for trying everything without a download."""
