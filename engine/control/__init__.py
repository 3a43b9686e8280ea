"""Requests to a run in progress, and the control word that passes them to the compiled program."""
