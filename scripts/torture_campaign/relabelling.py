"""Soundly made label arrays that hold the wrong labels, written by zarr."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import zarr


def permute_labels(folder: Path, draw: random.Random) -> str:
    """Write the labels of a split in another order, with sound checksums; return what was done."""
    array = zarr.open_array(str(folder), mode="r+")
    labels = np.asarray(array[:])
    one, other = draw.sample(range(len(labels)), 2)
    while labels[one] == labels[other]:
        one, other = draw.sample(range(len(labels)), 2)
    labels[[one, other]] = labels[[other, one]]
    array[:] = labels
    return f"the labels of images {one} and {other} swapped, with sound checksums"
