"""A small synthetic data set for trying out Loopfeed without a download."""
