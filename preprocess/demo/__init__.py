"""A small synthetic data set, to try everything without a download."""
