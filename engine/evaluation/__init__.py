"""Counting a split: the tally of the program, and evaluations outside of a training."""
