"""Decoding of image files to RGB pixels of the packed size, with limits on time and memory."""
