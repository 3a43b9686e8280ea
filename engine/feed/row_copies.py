"""Copying of a batch's images into the program's buffer, with several threads if that is faster.

One core does not saturate the memory bandwidth, least of all from pages scattered over mapped files. Does not depend
on rings or steps.
"""

import sys
import sysconfig
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.workers import Pool

_MOST_SHOWN = 3


class Place(NamedTuple):
    """A line of a function that a thread has entered and not left: file, number of the line, name of the function."""

    file: str
    line: int
    function: str


def places_of(thread: int | None) -> list[Place]:
    """Return where the thread of this identifier stands, the innermost place first; empty if it has ended."""
    frame = None if thread is None else sys._current_frames().get(thread)
    stack = [] if frame is None else traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    return [Place(each.filename, each.lineno or 0, each.name) for each in stack]


def _is_in_library(place: Place) -> bool:
    return place.file.startswith((sysconfig.get_path("stdlib"), "<frozen ")) or "site-packages" in place.file


def describe_places(places: list[Place]) -> str:
    """Return a sentence about the innermost places and, if they are all in libraries, the first that is not."""
    shown = places[:_MOST_SHOWN]
    if all(map(_is_in_library, shown)):
        shown += [each for each in places[_MOST_SHOWN:] if not _is_in_library(each)][:1]
    return "Its thread is at " + ", called from ".join(f"{each.file}:{each.line} ({each.function})" for each in shown)


# Passing a part to another thread takes as long as copying a megabyte.
_LEAST_PART_BYTES = 1 << 22

type Rows = Sequence[NDArray[np.uint32]] | NDArray[np.uint32]


class RowCopies:
    """Copies with up to `num_threads` threads: the calling thread, and others that start when first needed.

    Thread-safe. The threads are daemons: a page that never arrives must not keep the process alive.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_others = num_threads - 1
        self._others = Pool(self._num_others, "row-copies")

    def copy(self, rows: Rows, pixels: NDArray[np.uint32]) -> None:
        """Copy the b images in `rows` (uint32 [H, words per row] each, in one or more arrays) to `pixels` [b, H, …].

        Returns or raises only after every thread has stopped writing, because the memory of `pixels` then belongs to
        the program again. There is no time limit, because a copy cannot have one.
        """
        num_parts = pixels.nbytes // _LEAST_PART_BYTES
        if num_parts > 1:
            num_parts = min(num_parts, 1 + self._num_others, len(pixels))
            num_parts = min(num_parts, 1 + self._others.start(num_parts - 1))
        if num_parts <= 1:
            _copy(rows, pixels)
            return
        bounds = [len(pixels) * part // num_parts for part in range(num_parts + 1)]
        own, *others = [slice(*bound) for bound in pairwise(bounds)]
        copies: list[Future[None]] = []
        try:
            copies.extend(self._others.submit(_copy, rows[part], pixels[part]) for part in others)
            _copy(rows[own], pixels[own])
        finally:
            failures = [copy.exception() for copy in copies]
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        """Tell the threads to exit once they have copied the submitted parts; safe to call repeatedly."""
        self._others.close()


def _copy(rows: Rows, pixels: NDArray[np.uint32]) -> None:
    if isinstance(rows, np.ndarray):
        np.copyto(pixels, rows)
        return
    for target, row in zip(pixels, rows, strict=True):
        np.copyto(target, row)
