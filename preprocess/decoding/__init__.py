"""Decoding of image files into RGB images of the packed size, with limits on time and memory."""
