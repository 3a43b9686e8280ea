"""How much memory the images that are being decoded may take together: all workers never hold huge ones at once.

What waits for memory is only decoded later: outcomes depend on neither the budget nor the number of workers.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from preprocess.memory import host_memory_bytes

PIXEL_BYTES = 16
"""What a pixel of an image takes at most while it is decoded: measured, 16 for WebP, 12 for progressive CMYK JPEG."""

FILE_BUDGET_BYTES = 2**30
"""What the files of all images that are being decoded may take together."""

_HOST_SHARE = 4
_FREE_PIXEL_BYTES = 4_000_000 * PIXEL_BYTES
_FREE_FILE_BYTES = 16 * 2**20


class MemoryWaitError(MemoryError):
    """Nobody gave memory back for as long as a thread may wait for it."""


class MemoryBudget:
    """A number of bytes that threads share, in the order in which they ask.

    Args:
        num_bytes: what all of them may hold together. A thread that asks for more waits until nobody holds any.
        free_bytes: a thread that asks for this or less neither waits nor counts.
        timeout_s: how long a thread waits, in seconds, while no other one gives anything back.
    """

    def __init__(self, num_bytes: int, free_bytes: int, *, timeout_s: float) -> None:
        self._num_bytes, self._free_bytes, self._timeout_s = num_bytes, free_bytes, timeout_s
        self._changed = threading.Condition()
        self._held_bytes = 0
        self._waiting: deque[object] = deque()

    @contextmanager
    def held(self, num_bytes: int) -> Iterator[None]:
        """Hold so many bytes while the context lasts, as soon as they are free.

        Raises:
            MemoryWaitError: nobody gave memory back for `timeout_s`.
        """
        if num_bytes <= self._free_bytes:
            yield
            return
        self._take(num_bytes)
        try:
            yield
        finally:
            with self._changed:
                self._held_bytes -= num_bytes
                self._changed.notify_all()

    def _take(self, num_bytes: int) -> None:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._wait(lambda: self._waiting[0] is ticket and self._has_room(num_bytes), num_bytes)
                self._held_bytes += num_bytes
            finally:
                # Also of a thread that is interrupted: the others wait behind it.
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _wait(self, is_ready: Callable[[], bool], num_bytes: int) -> None:
        """Wait until ``is_ready``. Many may be ahead, so each change of the budget begins the limit anew."""
        while not is_ready():
            if not self._changed.wait(self._timeout_s) and not is_ready():
                raise MemoryWaitError(
                    f"waited {self._timeout_s:.0f} s for {num_bytes:,} bytes of memory that other images hold"
                )

    def _has_room(self, num_bytes: int) -> bool:
        return not self._held_bytes or self._held_bytes + num_bytes <= self._num_bytes


def pixel_budget(timeout_s: float) -> MemoryBudget:
    """Return the budget of decoded pixels: a quarter of this machine's memory, not counting images of 4 megapixels."""
    return MemoryBudget((host_memory_bytes() or 0) // _HOST_SHARE, _FREE_PIXEL_BYTES, timeout_s=timeout_s)


def file_budget(timeout_s: float) -> MemoryBudget:
    """Return the budget of encoded files: `FILE_BUDGET_BYTES`, not counting those that need 16 MiB or less."""
    return MemoryBudget(FILE_BUDGET_BYTES, _FREE_FILE_BYTES, timeout_s=timeout_s)
