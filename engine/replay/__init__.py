"""Replaying a stretch of a recorded run, and comparing the bits."""
