"""Code shared by the candidates of other projects: the images, a conversion that is done once, endless batches.

Needs only NumPy and the standard library; runs on the Python of every peer.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from protocol import timed

NUM_CLASSES = 1000


def open_images(array: Path) -> Any:
    """Open the images, uint8 [N, H, W, 3], mapped into memory."""
    return np.load(array, mmap_mode="r")


def labels_of(num_images: int) -> Any:
    """Return the labels, int32 [num_images]."""
    return np.arange(num_images, dtype=np.int32) % NUM_CLASSES


def convert_once(target: Path, convert: Callable[[Path], object]) -> Path:
    """Create a file or folder atomically if it does not exist."""
    if not target.exists():
        unfinished = target.with_name(f"unfinished-{target.name}")
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        unfinished.unlink(missing_ok=True)
        convert(unfinished)
        unfinished.rename(target)
    return target


def repeated(epoch: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Yield the batches of one epoch after the other, endlessly."""
    while True:
        yield from epoch()


def make_run(batches: Iterator[Any], check: Callable[[Any], tuple[int, ...]], shape: tuple[int, ...], warm: int) -> Any:
    """Return a `run` for `protocol.Channel.serve` that takes endless batches.

    Args:
        batches: the batches.
        check: returns the shape of a batch's images.
        shape: the required shape.
        warm: number of batches to take first: an epoch, so that files are in the page cache and workers are running.

    Raises:
        ValueError: a batch has another shape.
    """
    for number in range(warm):
        found = tuple(check(next(batches)))
        if found != shape:
            raise ValueError(f"every batch must have the shape {shape}, batch {number} has {found}")

    def work(num_units: int) -> None:
        for _ in range(num_units):
            next(batches)

    return timed(work)
