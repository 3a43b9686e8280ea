"""A small synthetic data set for trying out Feedloop without a download."""
