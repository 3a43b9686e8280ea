"""The end of a shard file of raw images: where each image lies (Zarr version 3, codec `sharding_indexed`).

Images of one size that lie in their order from the beginning of the file leave one index, which is known beforehand.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np

from preprocess.shards.checksum import crc32c

CHECKSUM_BYTES = 4
ENTRY = struct.Struct("<QQ")
"""Of a chunk its place in the file and its size there, in bytes."""
_NOT_THERE = 2**64 - 1


@lru_cache(maxsize=4)
def shard_index(num_images: int, shard_images: int, stored_bytes: int) -> bytes:
    """The index, of every image its place and size in bytes, and the index's checksum.

    Args:
        num_images: that the file holds.
        shard_images: that a whole shard holds; of those which are not there the index says so.
        stored_bytes: of one image in the file, its checksum included where there is one.
    """
    index = np.full((shard_images, 2), _NOT_THERE, "<u8")
    index[:num_images, 0] = stored_bytes * np.arange(num_images, dtype=np.uint64)
    index[:num_images, 1] = stored_bytes
    return index.tobytes() + crc32c(index).to_bytes(CHECKSUM_BYTES, "little")
