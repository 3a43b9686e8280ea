"""Copies a batch's images into the program's buffer, by several threads where one would be the slower.

One core does not fill the machine's memory bandwidth, least of all from pages scattered over mapped files. Knows
nothing of rings or steps.
"""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# To hand a part to another thread takes as long as to copy a megabyte.
_LEAST_PART_BYTES = 1 << 22

type Rows = Sequence[NDArray[np.uint32]] | NDArray[np.uint32]
type _Part = tuple[Rows, NDArray[np.uint32], Future[None]]


class RowCopies:
    """Up to `num_threads` threads that copy, the caller's one of them; the others are started when first needed.

    For any number of callers at once. The threads are daemons: a page that never comes must not keep a process alive.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_others = num_threads - 1
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._num_started = 0  # guarded, like the next
        self._is_closed = False

    def copy(self, rows: Rows, pixels: NDArray[np.uint32]) -> None:
        """Copies `rows`, b images uint32 [H, words of a row] in one array or in several, to `pixels` [b, H, …].

        Returns or raises when no thread writes any more, and not before: the memory of `pixels` is the program's again
        then. There is no time limit, as there is none to a copy.
        """
        num_parts = pixels.nbytes // _LEAST_PART_BYTES
        if num_parts > 1:
            num_parts = min(num_parts, 1 + self._num_others, len(pixels))
            num_parts = min(num_parts, 1 + self._start(num_parts - 1))
        if num_parts <= 1:
            _copy(rows, pixels)
            return
        bounds = [len(pixels) * part // num_parts for part in range(num_parts + 1)]
        own, *others = [slice(*bound) for bound in pairwise(bounds)]
        copies: list[Future[None]] = []
        try:
            left = [own, *(part for part in others if not self._hand_over(rows[part], pixels[part], copies))]
            for part in left:
                _copy(rows[part], pixels[part])
        finally:
            failures = [copy.exception() for copy in copies]
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        """Lets the threads end once they have copied what they were given; may be called again."""
        with self._guard:
            if not self._is_closed:
                self._is_closed = True
                for _ in range(self._num_started):
                    self._parts.put(None)

    def _start(self, num_wanted: int) -> int:
        """Starts threads that are missing; gives how many there are, fewer than wanted where the system has no more."""
        with self._guard:
            while self._num_started < num_wanted and not self._is_closed:
                name = f"row-copies-{self._num_started}"
                try:
                    threading.Thread(target=self._work, name=name, daemon=True).start()
                except RuntimeError:
                    break
                self._num_started += 1
            return self._num_started

    def _hand_over(self, rows: Rows, pixels: NDArray[np.uint32], copies: list[Future[None]]) -> bool:
        """Gives a part to the threads, unless they are to end; whether it was given."""
        with self._guard:
            if self._is_closed:
                return False
            copies.append(Future())
            self._parts.put((rows, pixels, copies[-1]))
            return True

    def _work(self) -> None:
        while (part := self._parts.get()) is not None:
            rows, pixels, copied = part
            try:
                _copy(rows, pixels)
            except BaseException as error:  # noqa: BLE001 - raised to the caller
                copied.set_exception(error)
            else:
                copied.set_result(None)
            del rows, pixels, part  # the program's memory


def _copy(rows: Rows, pixels: NDArray[np.uint32]) -> None:
    if isinstance(rows, np.ndarray):
        np.copyto(pixels, rows)
        return
    for target, row in zip(pixels, rows, strict=True):
        np.copyto(target, row)
