"""How much memory there is."""

import os


def host_memory_bytes() -> int | None:
    """Gives the memory that this process may have: the machine's, or its control group's limit; None if unknown."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:  # noqa: PTH123 - no path to join
            return min(total, int(limit.read()))
    except (OSError, ValueError):  # another kind of system, or "max"
        return total
