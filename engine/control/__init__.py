"""Requests to a running training, and the control word that carries them to the program."""
