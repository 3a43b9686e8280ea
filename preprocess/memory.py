"""The amount of memory available to this process, and used by it."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress

from loopfeed.preprocess.control_groups import group_folders

# Of cgroup v2 and v1.
_LIMITS = ("memory.max", "memory.limit_in_bytes")


def host_memory_bytes() -> int | None:
    """Return the memory limit of this process in bytes, or None if it is unknown.

    This is the memory of the machine, or the smallest limit of the process's control groups.
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    return min([total, *_group_limits()])


def process_memory_bytes() -> int | None:
    """Return the largest amount of memory that this process has used so far, in bytes, or None if it is unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest


def _group_limits() -> Iterator[int]:
    """Yield the memory limits of this process's control groups and of the groups above them."""
    for folder in group_folders("memory"):
        for name in _LIMITS:
            with suppress(OSError, ValueError):  # no such file, or its content is "max"
                yield int((folder / name).read_text(encoding="ascii"))
