"""Targets, loss, and the tally of an evaluation."""
