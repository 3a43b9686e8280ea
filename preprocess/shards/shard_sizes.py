"""The size that a local shard file must have, which shows a truncated file without reading its pixels."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from loopfeed.preprocess.claimed_size import is_plausible, stored_size
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.regular_file import open_regular, read_at
from loopfeed.preprocess.shards.arrays import PIXELS, describe_truncation, shard_key
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.shard_index import CHECKSUM_BYTES, ENTRY, end_of_chunks

_NUM_COMPARED = 64


def describe_wrong_size(location: Location, manifest: Manifest, shard: int) -> str | None:
    """Return what is wrong with the size of an existing shard file; None if it is right, or the store is remote.

    The manifest determines the size of a raw shard, and the index at its end that of a compressed one.

    Raises:
        ShardError: the file can't be read.
    """
    if location.local_path is None:
        return None
    path = location.local_path / PIXELS / shard_key(shard, 3)
    found, expected = path.stat().st_size, manifest.shard_bytes(shard)
    if expected is None:
        try:
            return None if _ends_with_index(path, found, manifest.shard_images) else "the shard file is truncated"
        except OSError as error:
            raise location.unreadable(path, error) from error
    if found > expected:
        return f"the shard file has {found:,} bytes, not {expected:,}"
    return describe_truncation(found, expected)


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
            stored += stored_size((location.local_path / PIXELS / shard_key(shard, 3)).stat())
    if not is_plausible(claimed, stored):
        raise ShardError(
            f"{location.display}: the images of the first {quantity(num_shards, 'shard file')} would take {claimed:,} "
            f"bytes, but these have {stored:,}; {location.remedy}"
        )


def _ends_with_index(path: Path, num_bytes: int, shard_images: int) -> bool:
    index_bytes = shard_images * ENTRY.size + CHECKSUM_BYTES
    if num_bytes < index_bytes:
        return False
    file = open_regular(path)
    try:
        index = read_at(file, index_bytes, num_bytes - index_bytes)
    finally:
        os.close(file)
    return end_of_chunks(index) == num_bytes - index_bytes
