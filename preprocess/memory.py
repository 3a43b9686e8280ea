"""How much memory there is."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def host_memory_bytes() -> int | None:
    """Gives the memory that this process may have: the machine's, or the least of its control groups' limits.

    None if unknown.
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    return min([total, *_group_limits()])


def _group_limits() -> Iterator[int]:
    """The limits of this process's control group and of those that it lies in (Linux, version 2)."""
    try:
        lines = _MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:  # another kind of system
        return
    for line in lines:
        number, _, path = line.partition("::")
        if number == "0":
            group = _GROUPS / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(_GROUPS):
                    with suppress(OSError, ValueError):  # there is none, or it says "max"
                        yield int((folder / "memory.max").read_text(encoding="ascii"))
