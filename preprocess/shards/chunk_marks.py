"""A record of which chunks of a shard file have been verified.

It uses one bit per chunk to save memory in a split of 10^8 images.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class ChunkMarks:
    """A set of chunk indices in one file, usable from any number of threads.

    If two threads mark neighbouring chunks at the same time, one mark may be lost; that chunk is then checked again.

    Args:
        num_chunks: number of chunks in the file; their indices are 0 to ``num_chunks - 1``.
    """

    def __init__(self, num_chunks: int) -> None:
        self._bits = np.zeros(-(-num_chunks // 8), np.uint8)

    def __contains__(self, slot: int) -> bool:
        return bool(self._bits[slot >> 3] >> (slot & 7) & 1)

    def add(self, slot: int) -> None:
        """Mark the chunk with index ``slot``."""
        self._bits[slot >> 3] |= 1 << (slot & 7)

    def missing(self, slots: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the positions in ``slots`` of the chunks that are not marked."""
        return np.flatnonzero(self._bits[slots >> 3] >> (slots & 7).astype(np.uint8) & 1 == 0)

    def slots(self) -> list[int]:
        """Return the indices of the marked chunks in ascending order."""
        found: list[int] = np.flatnonzero(np.unpackbits(self._bits, bitorder="little")).tolist()
        return found
