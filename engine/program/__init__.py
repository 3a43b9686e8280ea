"""The single compiled program of a run: its state, its loops and its static settings."""
