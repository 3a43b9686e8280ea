"""Replay of a range of updates of a recorded run, with a bitwise comparison."""
