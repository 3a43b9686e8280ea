"""Copies a batch's images into the program's buffer, by several threads where one would be the slower.

One core does not fill the machine's memory bandwidth, least of all from pages scattered over mapped files. Knows
nothing of rings or steps.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# To hand a part to another thread takes as long as to copy a megabyte.
_LEAST_PART_BYTES = 1 << 22


class RowCopies:
    """Up to `num_threads` threads that copy, the caller's one of them; the others are started when first needed."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._others: ThreadPoolExecutor | None = None

    def copy(self, rows: Sequence[NDArray[np.uint32]] | NDArray[np.uint32], pixels: NDArray[np.uint32]) -> None:
        """Copies `rows`, b images uint32 [H, W] in one array or in several, to `pixels`, uint32 [b, H, W].

        Returns when all is copied, and not before: the memory of `pixels` is the program's again then. There is no time
        limit, as there is none to a copy.
        """
        num_parts = max(1, min(self._num_threads, pixels.nbytes // _LEAST_PART_BYTES, len(pixels)))
        if num_parts == 1:
            _copy(rows, pixels)
            return
        bounds = [len(pixels) * part // num_parts for part in range(num_parts + 1)]
        own, *others = [slice(*bound) for bound in pairwise(bounds)]
        if self._others is None:
            self._others = ThreadPoolExecutor(self._num_threads - 1, thread_name_prefix="row-copies")
        copies = [self._others.submit(_copy, rows[part], pixels[part]) for part in others]
        try:
            _copy(rows[own], pixels[own])
        finally:
            failures = [copy.exception() for copy in copies]
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        """Lets the threads end; may be called again."""
        if self._others is not None:
            self._others.shutdown(wait=False)


def _copy(rows: Sequence[NDArray[np.uint32]] | NDArray[np.uint32], pixels: NDArray[np.uint32]) -> None:
    if isinstance(rows, np.ndarray):
        np.copyto(pixels, rows)
        return
    for target, row in zip(pixels, rows, strict=True):
        np.copyto(target, row)
