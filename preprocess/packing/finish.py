"""Finishes a split whose shards are all written: its labels, checksums and failures, and at last its manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from loopfeed.preprocess.decoding.notes import NOTHING, DecodeNotes
from loopfeed.preprocess.packing.channels import ChannelSums
from loopfeed.preprocess.packing.journal import Failure, Journal, ShardRecord, failures_text
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.packing.shard_writer import metadata_for, naming_writes, transfer_timeout_s
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.arrays import (
    CHECKSUMS,
    COLUMNS,
    EXTENTS,
    GROUPS,
    LABELS,
    METADATA_KEY,
    NAME_OFFSETS,
    NAMES,
    PIXELS,
    TARGETS,
    WEIGHTS,
    NumberShards,
    column_metadata,
    create_array,
    row_shards,
    shard_key,
    targets_metadata,
    words_digest,
    write_array,
)
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.manifest import FAILURES_KEY, FORMAT_VERSION, MANIFEST_KEY, Manifest
from loopfeed.preprocess.shards.split_files import sync_written
from loopfeed.preprocess.shards.targets import SplitTargets, Targets, count_classes, dtype_of, num_words
from loopfeed.preprocess.sources.listing import SourceSplit


def write_manifest(
    source: SourceSplit,
    targets: SplitTargets | None,
    location: Location,
    journal: Journal,
    plan: dict[str, Any],
    settings: PackSettings,
    records: list[ShardRecord],
) -> Manifest:
    """Write the metadata, all arrays beside the pixels, ``failures.jsonl`` and the manifest; return the latter.

    Raises:
        ShardError: no image could be packed, or the store can't be written.
    """
    labels = np.concatenate([record.labels for record in records])
    failures = failures_of(records)
    if not len(labels):
        raise ShardError(
            f"none of the {quantity(len(source), 'image')} of {source.name!r} could be packed; correct the "
            "source. The first "
            f"failure is {printable(failures[0].path)}: {failures[0].reason}"
        )
    packed = np.delete(np.arange(len(source)), np.array([failure.index for failure in failures], np.int64))
    if targets is None:
        numbers = label_numbers(labels, len(source.classes))
    else:
        numbers = target_numbers(targets, packed, len(source.classes))
    others = _other_numbers(source, plan, settings, records, packed)
    noted = failures_text(failures)
    journal.check_owner()
    metadata_digests = {PIXELS: create_metadata(location, PIXELS, metadata_for(len(labels), settings))}
    metadata_digests |= {each.name: each.write(location) for each in (numbers, *others)}
    digests = {each.name: each.digests for each in others}
    fields = numbers.manifest_fields | {
        "failures_digest": hashlib.sha256(noted).hexdigest(),
        "checksum_digests": digests.pop(CHECKSUMS, ()),
        "extent_digests": digests.pop(EXTENTS, ()),
        "metadata_digests": metadata_digests,
        "column_digests": digests,
    }
    for each in others:
        fields |= each.described
    if plan["format_version"] == 1:
        del fields["label_digests"], fields["metadata_digests"]
    manifest = _manifest_of(source, plan, settings, records, len(labels), fields)
    location.write(FAILURES_KEY, noted)
    journal.check_owner()
    sync_written(location)
    location.write(MANIFEST_KEY, manifest.to_json().encode())
    sync_written(location)
    return manifest


def _other_numbers(
    source: SourceSplit,
    plan: dict[str, Any],
    settings: PackSettings,
    records: list[ShardRecord],
    packed: NDArray[np.int64],
) -> list[Numbers]:
    """Return the arrays of a split beside the pixels and its labels or targets."""
    found = []
    if settings.checksum and plan["format_version"] > 1:
        found.append(column_of(CHECKSUMS, np.concatenate([record.checksums for record in records])))
    if settings.rule.canvas is not None:
        found.append(column_of(EXTENTS, np.concatenate([record.extents for record in records])))
    return found + (column_numbers(source, packed) if plan["format_version"] >= FORMAT_VERSION else [])


def _manifest_of(
    source: SourceSplit,
    plan: dict[str, Any],
    settings: PackSettings,
    records: list[ShardRecord],
    num_images: int,
    fields: dict[str, Any],
) -> Manifest:
    """Return the manifest of a split of ``num_images``; ``fields`` are those of the labels, and the digests."""
    sums = sum((record.sums for record in records), ChannelSums())
    return Manifest(
        format_version=plan["format_version"],
        num_images=num_images,
        height=settings.rule.stored_shape[0],
        width=settings.rule.stored_shape[1],
        layout=plan["layout"],
        codec=settings.codec,
        checksum=settings.checksum,
        shard_images=settings.resolved_shard_images,
        classes=tuple(source.classes),
        channel_mean=sums.mean(),
        channel_std=sums.std(),
        resize_rule=plan["resize_rule"],
        source_digest=plan["source_digest"],
        num_failures=sum(len(record.failures) for record in records),
        tool_versions=plan["tool_versions"],
        shard_digests=tuple(record.digest for record in records if len(record.labels)),
        **fields,
    )


def failures_of(records: Sequence[ShardRecord]) -> tuple[Failure, ...]:
    """Return the failures of all shards, in source order."""
    return tuple(failure for record in records for failure in record.failures)


def notes_of(records: Iterable[ShardRecord]) -> DecodeNotes:
    """Return what the pack should say about the images of all shards."""
    return sum((record.notes for record in records), NOTHING)


@dataclass(frozen=True, eq=False)
class Numbers:
    """An array with one number or one row per image, to be written.

    Attributes:
        name: the name of the array.
        metadata: its Zarr metadata.
        shards: how it is divided into shard files.
        values: the numbers ``[N]`` or rows ``[N, words]``.
        described: the fields of the manifest that describe the values, without digests.
    """

    name: str
    metadata: dict[str, Any]
    shards: NumberShards
    values: NDArray[Any] | NameBytes
    described: dict[str, Any]

    @property
    def digests(self) -> tuple[str, ...]:
        """The SHA-256 of the numbers of each shard file."""
        return tuple(words_digest([each]) for each in self._parts())

    @property
    def manifest_fields(self) -> dict[str, Any]:
        """The fields of the manifest for labels or targets."""
        return self.described | {"labels_digest": words_digest(self._parts()), "label_digests": self.digests}

    def _parts(self) -> Iterator[NDArray[Any]]:
        for start, stop in self.shards.ranges(len(self.values)):
            yield self.values[start:stop]

    def write(self, location: Location) -> str:
        """Write the array, and return the hexadecimal SHA-256 of its metadata file; raise ShardError on failure."""
        digest = create_metadata(location, self.name, self.metadata)
        array = write_array(location, self.name, self.metadata)
        for part, (start, stop) in enumerate(self.shards.ranges(len(self.values))):
            location.make_folder(f"{self.name}/{shard_key(part, self.shards.rank)}")
            values = self.values[start:stop]
            timeout_s = transfer_timeout_s(location, values.nbytes)
            with naming_writes(location, self.name, timeout_s), ts.Transaction() as transaction:
                array.with_transaction(transaction)[start:stop].write(values).result(timeout=timeout_s)
        return digest


def column_of(name: str, values: NDArray[Any] | NameBytes, **described: Any) -> Numbers:
    """Return one of `COLUMNS`, to be written; ``described`` as of `Numbers`."""
    return Numbers(name, column_metadata(name, len(values)), COLUMNS[name].shards, values, described)


def label_numbers(labels: NDArray[np.uint16], num_classes: int) -> Numbers:
    """Return the labels, uint16 ``[N]``, to be written."""
    return column_of(LABELS, labels, class_counts=tuple(np.bincount(labels, minlength=num_classes).tolist()))


def column_numbers(source: SourceSplit, packed: NDArray[np.int64]) -> list[Numbers]:
    """Return what a split has since version 5, to be written: the names of its images, and weights and groups, if any.

    Args:
        source: the images.
        packed: int64 ``[N]``, the indices of the images in the pack order.
    """
    lengths = (len(encoded_key(source, index)) for index in packed.tolist())
    offsets = np.zeros(len(packed) + 1, np.uint64)
    np.cumsum(np.fromiter(lengths, np.uint64, len(packed)), out=offsets[1:])
    text = NameBytes(source, packed, offsets)
    found = [column_of(NAMES, text, name_bytes=len(text)), column_of(NAME_OFFSETS, offsets)]
    if source.weights is not None:
        found.append(column_of(WEIGHTS, source.weights[packed].astype(np.float32)))
    if source.groups is not None:
        groups = source.groups[packed].astype(np.uint32)
        found.append(column_of(GROUPS, groups, num_groups=int(source.groups.max()) + 1))
    return found


def encoded_key(source: SourceSplit, index: int) -> bytes:
    """Return the name that a pack keeps of an image: its key as UTF-8, with the bytes of a file name as they are."""
    return source.key(index).encode("utf-8", "surrogateescape")


@dataclass(frozen=True, eq=False)
class NameBytes:
    """The names of images one after another, like a uint8 array, of which only a part is in memory at a time.

    Attributes:
        source: the images.
        packed: int64 ``[N]``, the indices of the images in the pack order.
        offsets: uint64 ``[N + 1]``, where each name begins.
    """

    source: SourceSplit
    packed: NDArray[np.int64]
    offsets: NDArray[np.uint64]

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __getitem__(self, places: slice) -> NDArray[np.uint8]:
        """Return the bytes from ``places.start`` to ``places.stop``."""
        first = int(np.searchsorted(self.offsets, places.start, "right")) - 1
        last = int(np.searchsorted(self.offsets, places.stop, "left"))
        text = b"".join(encoded_key(self.source, index) for index in self.packed[first:last].tolist())
        begin = int(self.offsets[first])
        return np.frombuffer(text, np.uint8)[places.start - begin : places.stop - begin]


def target_numbers(targets: SplitTargets, packed: NDArray[np.int64], num_targets: int) -> Numbers:
    """Return the targets of the images with the indices ``packed`` in the pack order, to be written."""
    values, kind = targets.values[packed], targets.kind
    counts: tuple[int, ...] = ()
    minima: tuple[float, ...] = ()
    maxima: tuple[float, ...] = ()
    if kind == "classes":
        counts = count_classes(values.view(np.uint32), num_targets)
    else:
        minima, maxima = tuple(values.min(axis=0).tolist()), tuple(values.max(axis=0).tolist())
    words = num_words(kind, num_targets)
    described = {"class_counts": counts, "targets": Targets(kind, targets.labels_file, minima, maxima)}
    return Numbers(TARGETS, targets_metadata(len(values), words, dtype_of(kind)), row_shards(words), values, described)


def create_metadata(location: Location, name: str, metadata: dict[str, Any]) -> str:
    """Write an array's metadata and return the hexadecimal SHA-256 of the metadata file."""
    create_array(location, name, metadata)
    return hashlib.sha256(location.read(f"{name}/{METADATA_KEY}") or b"").hexdigest()
