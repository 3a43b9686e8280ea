"""The one compiled program of a run: its state, its loop and its static settings."""
