"""Encoded images to RGB pixels of the packed size, within bounds on time and memory."""
