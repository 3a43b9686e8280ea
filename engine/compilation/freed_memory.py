"""Returns to the system what compiling a program has freed, which the C library would keep for its next allocations.

glibc keeps freed memory in its heap and in an *arena* for each thread that allocated: hundreds of megabytes after a
program was compiled, and as much again in another arena if the next one compiles on another thread
(`loopfeed.engine.control.signals` therefore uses the same). Other C libraries are left to themselves.
"""

import ctypes
from functools import cache
from typing import Any


def return_freed_memory() -> None:
    """Return freed memory to the system: some 10 ms after a run, and milliseconds if there is none."""
    trim = _find_trim()
    if trim is not None:
        trim(0)


@cache
def _find_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library; TypeError on Windows
        return None
