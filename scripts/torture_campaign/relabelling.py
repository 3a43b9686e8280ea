"""Valid label arrays with wrong labels, written by zarr."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import zarr


def permute_labels(folder: Path, draw: random.Random) -> str:
    """Swap two labels of a split, with valid checksums; return a description."""
    array = zarr.open_array(str(folder), mode="r+")
    labels = np.asarray(array[:])
    one, other = draw.sample(range(len(labels)), 2)
    while labels[one] == labels[other]:
        one, other = draw.sample(range(len(labels)), 2)
    labels[[one, other]] = labels[[other, one]]
    array[:] = labels
    return f"the labels of images {one} and {other} swapped, with sound checksums"
