"""Replay of a range of updates of a recorded run, and bitwise comparison with its record."""
