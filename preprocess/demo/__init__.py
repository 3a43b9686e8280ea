"""A small drawn data set, for trying everything without a download."""
