"""Turns the blocks of a pack in parts into its shards.

A block has as many source images as a shard has images, so it is a shard unless an image could not be packed, in it or
in an earlier block. From the first such block on, images move towards the start until every shard is full, as on a
single machine; their pixels are read from the blocks. A shard replaces the block of its number, whose images are
by then in this shard or in earlier ones. The journal records a shard just before, so that an interruption at any point
can be continued: either the file has the recorded digest, or it still is the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from loopfeed.preprocess.extents import Extent
from loopfeed.preprocess.packing.channels import channel_sums
from loopfeed.preprocess.packing.journal import Journal, ShardRecord
from loopfeed.preprocess.packing.pipeline import Outcome, PackedImage
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.packing.shard_writer import ShardWriter, metadata_for, transfer_timeout_s
from loopfeed.preprocess.shards.arrays import PIXELS, damage, image_key, words_digest, write_array
from loopfeed.preprocess.shards.checksum import crc32c
from loopfeed.preprocess.shards.location import Location, ShardError

_READ_BYTES = 16 << 20


def recut(
    location: Location,
    journal: Journal,
    plan: Mapping[str, Any],
    settings: PackSettings,
    blocks: Sequence[ShardRecord],
    on_progress: Callable[[int], None],
) -> list[ShardRecord]:
    """Rewrite shard files where images could not be packed, and return the records of all shards.

    Args:
        location: the split's folder.
        journal: the journal of the shards.
        plan: the plan of the pack.
        settings: how to pack.
        blocks: the records of all blocks.
        on_progress: called with the number of source images that are in their shards.

    Raises:
        ShardError: a block is damaged, or the store can't be read or written.
    """
    first = next((block for block, record in enumerate(blocks[:-1]) if record.failures), None)
    if first is None:
        return list(blocks)
    total = blocks[-1].stop
    array = write_array(location, PIXELS, metadata_for(total, settings))
    reader = _BlockReader(location, array, settings)
    records = [*blocks[:first], *_rewritten(reader, journal.recorded(plan), first)]
    start = records[-1].stop if records else 0
    writer = ShardWriter(location, journal, settings, total, records, replaces_blocks=True)
    with writer:
        for block, record in enumerate(blocks):
            if record.stop <= start:
                continue
            on_progress(max(start, record.start))
            for outcome in reader.outcomes(block, record, start):
                writer.take(outcome)
        writer.finish(total)
    return writer.records


def _rewritten(reader: _BlockReader, found: Mapping[int, ShardRecord], first: int) -> list[ShardRecord]:
    """Return the records of the shards from ``first`` on that an interrupted call has written."""
    records: list[ShardRecord] = []
    while (record := found.get(first + len(records))) is not None:
        records.append(record)
    if records and len(records[-1].labels):
        shard = first + len(records) - 1
        if reader.digest(shard, len(records[-1].labels)) != records[-1].digest:
            records.pop()  # the file is still the block
    return records


class _DamagedBlockError(ShardError):
    """Error raised if a block's file is not the one that was written."""


class _BlockReader:
    """Reads the outcomes of a block from its record and its shard file."""

    def __init__(self, location: Location, array: ts.TensorStore, settings: PackSettings) -> None:
        self._location, self._array, self._settings = location, array, settings
        self._step = max(1, _READ_BYTES // settings.image_bytes)
        self._timeout_s = transfer_timeout_s(location, self._step * settings.image_bytes)

    def digest(self, shard: int, num_images: int) -> str | None:
        """Return the SHA-256 of a shard's words, or None if it has fewer images or is damaged."""
        ranges = [(at, min(at + self._step, num_images)) for at in range(0, num_images, self._step)]
        try:
            return words_digest(self._read(shard, start, stop) for start, stop in ranges)
        except _DamagedBlockError:
            return None

    def outcomes(self, block: int, record: ShardRecord, start: int) -> Iterator[Outcome]:
        """Yield the outcomes of a block from index ``start`` on, in source order."""
        failures = {failure.index: failure for failure in record.failures}
        packed = [index for index in range(record.start, record.stop) if index not in failures]
        position = {index: at for at, index in enumerate(packed)}
        rows = self._rows(block, record, sum(index < start for index in packed))
        for index in range(max(start, record.start), record.stop):
            failure = failures.get(index)
            if failure is not None:
                yield failure
            else:
                words, sums = next(rows)
                at = position[index]
                extent = Extent.from_word(int(record.extents[at])) if len(record.extents) else None
                yield PackedImage(index, int(record.labels[at]), words, sums, extent=extent)

    def _rows(
        self, block: int, record: ShardRecord, first: int
    ) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.int64]]]:
        """Yield the words and the channel sums of a block's images from number ``first`` on."""
        for at in range(first, len(record.labels), self._step):
            stop = min(at + self._step, len(record.labels))
            words = self._read(block, at, stop)
            if len(record.checksums):
                found = [crc32c(np.ascontiguousarray(each, "<u4")) for each in words]
                if found != record.checksums[at:stop].tolist():
                    raise self._damaged(block, "its images are not those that were packed")
            yield from zip(words, channel_sums(words, self._settings.layout), strict=True)

    def _read(self, block: int, start: int, stop: int) -> NDArray[np.uint32]:
        """Return the words of a block's images from number ``start`` to ``stop``."""
        base = block * self._settings.resolved_shard_images
        try:
            return np.asarray(self._array[base + start : base + stop].read().result(timeout=self._timeout_s))
        except (ValueError, OSError, RuntimeError) as error:
            if (outage := self._location.outage(error)) is not None:
                raise ShardError(f"{self._name(block)} can't be read: {outage}") from error
            raise self._damaged(block, damage(error)) from error

    def _damaged(self, block: int, what: str) -> ShardError:
        return _DamagedBlockError(
            f"{self._name(block)}: {what}; delete this file, start its part again, then run this command again"
        )

    def _name(self, block: int) -> str:
        return f"{self._location.display}{image_key(block)}"
