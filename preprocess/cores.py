"""The number of CPU cores that this process may use, which in a container can be smaller than the machine's."""

import os


def num_cores() -> int:
    """Return the number of CPU cores that this process may run on, at least 1."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
