"""Finishes a split whose shards are all written: its labels, checksums and failures, and at last its manifest."""

import hashlib
from collections.abc import Iterable, Sequence
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
    EXTENTS,
    LABELS,
    METADATA_KEY,
    NUMBERS,
    PIXELS,
    TARGETS,
    NumberShards,
    checksums_metadata,
    create_array,
    extents_metadata,
    labels_metadata,
    row_shards,
    shard_key,
    targets_metadata,
    words_digest,
    write_array,
)
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.manifest import FAILURES_KEY, MANIFEST_KEY, Manifest
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
    """Write the metadata, the labels or targets, the checksums, ``failures.jsonl`` and the manifest; return the latter.

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
    if targets is None:
        numbers = label_numbers(labels, len(source.classes))
    else:
        packed = np.delete(np.arange(len(source)), np.array([failure.index for failure in failures], np.int64))
        numbers = target_numbers(targets, packed, len(source.classes))
    checksums = None
    if settings.checksum and plan["format_version"] > 1:
        checksums = checksum_numbers(np.concatenate([record.checksums for record in records]))
    extents = None
    if settings.rule.canvas is not None:
        extents = extent_numbers(np.concatenate([record.extents for record in records]))
    noted = failures_text(failures)
    journal.check_owner()
    metadata_digests = {PIXELS: create_metadata(location, PIXELS, metadata_for(len(labels), settings))}
    metadata_digests[numbers.name] = numbers.write(location)
    if checksums is not None:
        metadata_digests[CHECKSUMS] = checksums.write(location)
    if extents is not None:
        metadata_digests[EXTENTS] = extents.write(location)
    fields = numbers.manifest_fields | {
        "failures_digest": hashlib.sha256(noted).hexdigest(),
        "checksum_digests": () if checksums is None else checksums.digests,
        "extent_digests": () if extents is None else extents.digests,
        "metadata_digests": metadata_digests,
    }
    if plan["format_version"] == 1:
        del fields["label_digests"], fields["metadata_digests"]
    manifest = _manifest_of(source, plan, settings, records, len(labels), fields)
    location.write(FAILURES_KEY, noted)
    journal.check_owner()
    sync_written(location)
    location.write(MANIFEST_KEY, manifest.to_json().encode())
    sync_written(location)
    return manifest


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
    values: NDArray[Any]
    described: dict[str, Any]

    @property
    def digests(self) -> tuple[str, ...]:
        """The SHA-256 of the numbers of each shard file."""
        return tuple(words_digest([self.values[start:stop]]) for start, stop in self.shards.ranges(len(self.values)))

    @property
    def manifest_fields(self) -> dict[str, Any]:
        """The fields of the manifest for labels or targets."""
        return self.described | {"labels_digest": words_digest([self.values]), "label_digests": self.digests}

    def write(self, location: Location) -> str:
        """Write the array, and return the hexadecimal SHA-256 of its metadata file; raise ShardError on failure."""
        digest = create_metadata(location, self.name, self.metadata)
        array = write_array(location, self.name, self.metadata)
        timeout_s = transfer_timeout_s(location, self.values.nbytes)
        for part, (start, stop) in enumerate(self.shards.ranges(len(self.values))):
            location.make_folder(f"{self.name}/{shard_key(part, self.shards.rank)}")
            values = self.values[start:stop]
            with naming_writes(location, self.name, timeout_s), ts.Transaction() as transaction:
                array.with_transaction(transaction)[start:stop].write(values).result(timeout=timeout_s)
        return digest


def label_numbers(labels: NDArray[np.uint16], num_classes: int) -> Numbers:
    """Return the labels, uint16 ``[N]``, to be written."""
    counts = tuple(np.bincount(labels, minlength=num_classes).tolist())
    return Numbers(LABELS, labels_metadata(len(labels)), NUMBERS, labels, {"class_counts": counts})


def checksum_numbers(checksums: NDArray[np.uint32]) -> Numbers:
    """Return the checksums, uint32 ``[N]``, to be written."""
    return Numbers(CHECKSUMS, checksums_metadata(len(checksums)), NUMBERS, checksums, {})


def extent_numbers(extents: NDArray[np.uint32]) -> Numbers:
    """Return the places of whole pictures, uint32 ``[N]``, to be written; see `loopfeed.preprocess.extents`."""
    return Numbers(EXTENTS, extents_metadata(len(extents)), NUMBERS, extents, {})


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
