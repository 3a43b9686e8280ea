"""The index at the end of a shard file of raw images (Zarr version 3, codec `sharding_indexed`).

If all images have the same size and are stored in order from the start of the file, the index is known in advance.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np

from loopfeed.preprocess.shards.checksum import crc32c

CHECKSUM_BYTES = 4
ENTRY = struct.Struct("<QQ")
"""Offset of a chunk in the file and its size, in bytes."""
_MISSING = 2**64 - 1


@lru_cache(maxsize=4)
def shard_index(num_images: int, shard_images: int, stored_bytes: int) -> bytes:
    """Return the index (the offset and the size of each image, in bytes), followed by the checksum of the index.

    Args:
        num_images: number of images in the file.
        shard_images: number of images in a full shard; the missing ones are marked in the index.
        stored_bytes: size of one image in the file, including its checksum if it has one.
    """
    index = np.full((shard_images, 2), _MISSING, "<u8")
    index[:num_images, 0] = stored_bytes * np.arange(num_images, dtype=np.uint64)
    index[:num_images, 1] = stored_bytes
    return index.tobytes() + crc32c(index).to_bytes(CHECKSUM_BYTES, "little")


def end_of_chunks(index: bytes) -> int | None:
    """Return where the last chunk ends in a shard with this index and its checksum; None if the index is damaged."""
    entries, checksum = index[:-CHECKSUM_BYTES], int.from_bytes(index[-CHECKSUM_BYTES:], "little")
    if crc32c(np.frombuffer(entries, np.uint8)) != checksum:
        return None
    chunks = np.frombuffer(entries, "<u8").reshape(-1, 2)
    there = chunks[chunks[:, 0] != _MISSING]
    return int(there.sum(axis=1).max()) if len(there) else 0
