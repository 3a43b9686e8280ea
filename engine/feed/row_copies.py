"""Copying of a batch's images into the program's buffer, with several threads if that is faster.

One core does not saturate the memory bandwidth, least of all from pages scattered over mapped files. Does not depend
on rings or steps.
"""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# Passing a part to another thread takes as long as copying a megabyte.
_LEAST_PART_BYTES = 1 << 22

type Rows = Sequence[NDArray[np.uint32]] | NDArray[np.uint32]
type _Part = tuple[Rows, NDArray[np.uint32], Future[None]]


class RowCopies:
    """A pool of up to `num_threads` copying threads: the calling thread, and others that start when first needed.

    Thread-safe. The threads are daemons: a page that never arrives must not keep the process alive.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_others = num_threads - 1
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._num_started = 0  # guarded by _guard, as is the following
        self._is_closed = False

    def copy(self, rows: Rows, pixels: NDArray[np.uint32]) -> None:
        """Copy the b images in `rows` (uint32 [H, words per row] each, in one or more arrays) to `pixels` [b, H, …].

        Returns or raises only after every thread has stopped writing, because the memory of `pixels` then belongs to
        the program again. There is no time limit, because a copy cannot have one.
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
            remaining = [own, *(part for part in others if not self._submit(rows[part], pixels[part], copies))]
            for part in remaining:
                _copy(rows[part], pixels[part])
        finally:
            failures = [copy.exception() for copy in copies]
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        """Tell the threads to exit once they have copied the submitted parts; safe to call repeatedly."""
        with self._guard:
            if not self._is_closed:
                self._is_closed = True
                for _ in range(self._num_started):
                    self._parts.put(None)

    def _start(self, num_wanted: int) -> int:
        """Start threads until `num_wanted` exist or the system refuses to start one; return how many exist."""
        with self._guard:
            while self._num_started < num_wanted and not self._is_closed:
                name = f"row-copies-{self._num_started}"
                try:
                    threading.Thread(target=self._work, name=name, daemon=True).start()
                except RuntimeError:
                    break
                self._num_started += 1
            return self._num_started

    def _submit(self, rows: Rows, pixels: NDArray[np.uint32], copies: list[Future[None]]) -> bool:
        """Submit a part of a copy to the threads; return False if the pool is closed."""
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
            except BaseException as error:  # noqa: BLE001 - raised in the caller
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
