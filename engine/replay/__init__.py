"""Making a stretch of a recorded run once more, and comparing the bits."""
