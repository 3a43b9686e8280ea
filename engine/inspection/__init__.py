"""The inside of a run's compiled program: work by scope, convolutions, buffers, the carry, host calls, and faults."""
