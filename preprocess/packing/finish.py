"""Finishes a split whose shards are all written: its labels, checksums and failures, and at last its manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loopfeed.preprocess.decoding.notes import NOTHING, DecodeNotes
from loopfeed.preprocess.packing.channels import ChannelSums
from loopfeed.preprocess.packing.journal import Failure, Journal, ShardRecord
from loopfeed.preprocess.packing.numbers import checksum_numbers, create_metadata, label_numbers, target_numbers
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.packing.shard_writer import metadata_for
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.arrays import CHECKSUMS, PIXELS
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.manifest import FAILURES_KEY, MANIFEST_KEY, Manifest
from loopfeed.preprocess.shards.unsynced import sync_written

if TYPE_CHECKING:
    from loopfeed.preprocess.shards.targets import SplitTargets
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
    noted = "".join(f"{failure.to_json()}\n" for failure in failures).encode()
    journal.check_owner()
    metadata_digests = {PIXELS: create_metadata(location, PIXELS, metadata_for(len(labels), settings))}
    metadata_digests[numbers.name] = numbers.write(location)
    if checksums is not None:
        metadata_digests[CHECKSUMS] = checksums.write(location)
    fields = numbers.manifest_fields | {
        "failures_digest": hashlib.sha256(noted).hexdigest(),
        "checksum_digests": () if checksums is None else checksums.digests,
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
        height=settings.rule.size,
        width=settings.rule.size,
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
