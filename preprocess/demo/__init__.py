"""A small drawn data set, so that everything can be tried without a download."""
