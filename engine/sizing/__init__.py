"""The plan of a run: memory of a device, bytes that each host moves, what bounds the run, and space on disk."""
