"""The size that a local shard file must have, which shows a truncated file without reading its pixels."""

from __future__ import annotations

import os
from contextlib import suppress

from loopfeed.preprocess.claimed_size import is_plausible, stored_size
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.regular_file import open_regular, read_at
from loopfeed.preprocess.shards.arrays import image_key
from loopfeed.preprocess.shards.checksum import CHECKSUM_BYTES, ENTRY, end_of_chunks
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.manifest import Manifest

_NUM_COMPARED = 64


def describe_wrong_size(location: Location, manifest: Manifest, shard: int) -> str | None:
    """Return what is wrong with the size of an existing shard file; None if it is right, or the store is remote.

    The manifest determines the size of a raw shard, and the index at its end that of a compressed one.

    Raises:
        ShardError: the file can't be read.
    """
    if location.local_path is None:
        return None
    path = location.local_path / image_key(shard)
    expected = manifest.shard_bytes(shard)
    if expected is None:
        return describe_wrong_end(location, image_key(shard), manifest.shard_images)
    found = path.stat().st_size
    if found > expected:
        return f"the shard file has {found:,} bytes, not {expected:,}"
    return describe_truncated(location, manifest, shard)


def check_plausible(location: Location, manifest: Manifest) -> None:
    """Raise ShardError if the first shard files of a local split are far too small for their images.

    Buffers are made for images of the size that the manifest claims, before the first one is read.
    """
    if location.local_path is None:
        return
    num_shards = min(manifest.num_shards, _NUM_COMPARED)
    claimed, stored = manifest.shard_range(num_shards - 1)[1] * manifest.image_bytes, 0
    for shard in range(num_shards):
        with suppress(OSError):
            stored += stored_size((location.local_path / image_key(shard)).stat())
    if not is_plausible(claimed, stored):
        raise ShardError(
            f"{location.display}: the images of the first {quantity(num_shards, 'shard file')} would take {claimed:,} "
            f"bytes, but these have {stored:,}; {location.remedy}"
        )


def describe_truncated(location: Location, manifest: Manifest, shard: int) -> str | None:
    """Return how far an existing local shard file of a known size is truncated, if it is."""
    expected = manifest.shard_bytes(shard)
    if location.local_path is None or expected is None:
        return None
    try:
        found = (location.local_path / image_key(shard)).stat().st_size
    except OSError:
        return None
    return None if found >= expected else f"the shard file is truncated to {found:,} of {expected:,} bytes"


def describe_wrong_end(location: Location, key: str, num_chunks: int) -> str | None:
    """Return what is wrong with the end of a shard file: its index, or bytes that are in none of its chunks.

    None if it is right, or the store is remote.

    Args:
        location: the folder of the split.
        key: the file.
        num_chunks: the number of entries of its index.

    Raises:
        ShardError: the file can't be read.
    """
    if location.local_path is None:
        return None
    path, index_bytes = location.local_path / key, num_chunks * ENTRY.size + CHECKSUM_BYTES
    try:
        start = path.stat().st_size - index_bytes
        file = open_regular(path)
        try:
            end = end_of_chunks(read_at(file, index_bytes, start)) if start >= 0 else None
        finally:
            os.close(file)
    except OSError as error:
        raise location.unreadable(path, error) from error
    if end is None or end > start:
        return "the shard file is truncated"
    return f"the shard file has {start - end:,} bytes that are in none of its chunks" if start > end else None
