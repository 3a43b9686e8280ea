"""The one compiled program of a run: its state, its loop, what is compiled into it."""
