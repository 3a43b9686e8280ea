"""A memory budget shared by all images that are being decoded, so that workers never hold many huge images at once.

An image that waits for memory is only decoded later: results depend on neither the budget nor the number of workers.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loopfeed.preprocess.control_groups import host_memory_bytes

PIXEL_BYTES = 16
"""Maximum memory per pixel while an image is decoded: measured, 16 for WebP, 12 for progressive CMYK JPEG."""

FILE_BUDGET_BYTES = 2**30
"""Maximum total size of the files of all images being decoded."""

_HOST_SHARE = 4
_FREE_PIXEL_BYTES = 4_000_000 * PIXEL_BYTES
_FREE_FILE_BYTES = 16 * 2**20


class MemoryWaitError(MemoryError):
    """Error raised if no memory is released within the time limit of a waiting thread."""


class MemoryBudget:
    """A memory budget in bytes, shared by threads. Requests are granted in the order in which they are made.

    Args:
        num_bytes: the total that all threads may hold. A larger request waits until no other thread holds any.
        free_bytes: requests of up to this size neither wait nor count.
        timeout_s: how long a request waits, in seconds, while no other thread releases memory.
    """

    def __init__(self, num_bytes: int, free_bytes: int, *, timeout_s: float) -> None:
        self._num_bytes, self._free_bytes, self._timeout_s = num_bytes, free_bytes, timeout_s
        self._changed = threading.Condition()
        self._held_bytes = 0
        self._waiting: deque[object] = deque()

    @contextmanager
    def held(self, num_bytes: int) -> Iterator[None]:
        """Wait until ``num_bytes`` are free, and reserve them until the context exits.

        Raises:
            MemoryWaitError: no memory was released for `timeout_s`.
        """
        if num_bytes <= self._free_bytes:
            yield
            return
        self._acquire(num_bytes)
        try:
            yield
        finally:
            with self._changed:
                self._held_bytes -= num_bytes
                self._changed.notify_all()

    def _acquire(self, num_bytes: int) -> None:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._wait(lambda: self._waiting[0] is ticket and self._has_room(num_bytes), num_bytes)
                self._held_bytes += num_bytes
            finally:
                # Also if this thread is interrupted, because the others wait for it.
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _wait(self, is_ready: Callable[[], bool], num_bytes: int) -> None:
        """Wait until ``is_ready()`` returns True.

        Every change to the budget restarts the time limit, because many threads may be ahead in the queue.
        """
        while not is_ready():
            if not self._changed.wait(self._timeout_s) and not is_ready():
                raise MemoryWaitError(
                    f"waited {self._timeout_s:.0f} s for {num_bytes:,} bytes of memory that other images hold; "
                    "use fewer workers"
                )

    def _has_room(self, num_bytes: int) -> bool:
        return not self._held_bytes or self._held_bytes + num_bytes <= self._num_bytes


def pixel_budget(timeout_s: float) -> MemoryBudget:
    """Return a budget for decoded pixels: a quarter of host memory. Images of up to 4 megapixels are not counted."""
    return MemoryBudget((host_memory_bytes() or 0) // _HOST_SHARE, _FREE_PIXEL_BYTES, timeout_s=timeout_s)


def file_budget(timeout_s: float) -> MemoryBudget:
    """Return a budget of `FILE_BUDGET_BYTES` for encoded files. Files of up to 16 MiB are not counted."""
    return MemoryBudget(FILE_BUDGET_BYTES, _FREE_FILE_BYTES, timeout_s=timeout_s)
