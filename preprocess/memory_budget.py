"""How much memory the images that are being decoded may take together: all workers never hold huge ones at once.

What waits for memory is only decoded later: outcomes depend on neither the budget nor the number of workers.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from preprocess.memory import host_memory_bytes

PIXEL_BYTES = 16
"""What a pixel of an image takes at most while it is decoded: measured, 16 for WebP, 12 for progressive CMYK JPEG."""

FILE_BUDGET_BYTES = 2**30
"""What the files of all images that are being decoded may take together."""

_HOST_SHARE = 4
_FREE_PIXEL_BYTES = 4_000_000 * PIXEL_BYTES
_FREE_FILE_BYTES = 16 * 2**20


class MemoryBudget:
    """A number of bytes that threads share, in the order in which they ask.

    Args:
        num_bytes: what all of them may hold together. Who asks for more waits until it is alone.
        free_bytes: who asks for no more than this neither waits nor counts.
    """

    def __init__(self, num_bytes: int, free_bytes: int) -> None:
        self._num_bytes, self._free_bytes = num_bytes, free_bytes
        self._changed = threading.Condition()
        self._held_bytes = 0
        self._waiting: deque[object] = deque()

    @contextmanager
    def held(self, num_bytes: int) -> Iterator[None]:
        """Hold so many bytes while the context lasts, as soon as they are free.

        There is no limit of time here: those who hold bytes end by themselves, and the reader of the pipeline has one.
        """
        if num_bytes <= self._free_bytes:
            yield
            return
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket and self._has_room(num_bytes))
            self._waiting.popleft()
            self._held_bytes += num_bytes
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._held_bytes -= num_bytes
                self._changed.notify_all()

    def _has_room(self, num_bytes: int) -> bool:
        return not self._held_bytes or self._held_bytes + num_bytes <= self._num_bytes


def pixel_budget() -> MemoryBudget:
    """Return the budget of decoded pixels: a quarter of this machine's memory, images of 4 megapixels left out."""
    return MemoryBudget((host_memory_bytes() or 0) // _HOST_SHARE, _FREE_PIXEL_BYTES)


def file_budget() -> MemoryBudget:
    """Return the budget of encoded files: `FILE_BUDGET_BYTES`, files of 16 MiB left out."""
    return MemoryBudget(FILE_BUDGET_BYTES, _FREE_FILE_BYTES)
