"""The simple profiler: how long each phase and action of a run takes, on the host and inside the program."""
