"""The amount of memory available to this process, and used by it."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


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
    """Yield the memory limits of this process's control group and of the groups above it (Linux, cgroup v2)."""
    try:
        lines = _MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, _, path = line.partition("::")
        if number == "0":
            group = _GROUPS / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(_GROUPS):
                    with suppress(OSError, ValueError):  # no such file, or its content is "max"
                        yield int((folder / "memory.max").read_text(encoding="ascii"))
