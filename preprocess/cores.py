"""The number of cores that this process may use; in a container that is fewer than the machine has."""

import os


def num_cores() -> int:
    """Return the number of cores that the scheduler gives this process, at least 1."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
