"""Writes the labels or targets and the checksums of a split, and computes what the manifest says about them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from loopfeed.preprocess.packing.shard_writer import transfer_timeout_s
from loopfeed.preprocess.shards.arrays import (
    CHECKSUMS,
    LABELS,
    METADATA_KEY,
    NUMBERS,
    TARGETS,
    NumberShards,
    checksums_metadata,
    create_array,
    labels_metadata,
    row_shards,
    shard_key,
    targets_metadata,
    words_digest,
    write_array,
)
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.store_errors import write_fault
from loopfeed.preprocess.shards.targets import SplitTargets, Targets, count_classes, dtype_of, num_words


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
            try:
                with ts.Transaction() as transaction:
                    array.with_transaction(transaction)[start:stop].write(self.values[start:stop]).result(
                        timeout=timeout_s
                    )
            except TimeoutError as error:
                raise ShardError(
                    f"{location.display}{self.name} was not written within {timeout_s:.0f} s; check the disk or the "
                    "network, then run the same command again"
                ) from error
            except (ValueError, OSError, RuntimeError) as error:
                outage, repeat = location.outage(error), "run the same command again"
                fault = write_fault(error, repeat) if outage is None else f"{outage}, then {repeat}"
                raise ShardError(f"{location.display}{self.name} can't be written: {fault}") from error
        return digest


def label_numbers(labels: NDArray[np.uint16], num_classes: int) -> Numbers:
    """Return the labels, uint16 ``[N]``, to be written."""
    counts = tuple(np.bincount(labels, minlength=num_classes).tolist())
    return Numbers(LABELS, labels_metadata(len(labels)), NUMBERS, labels, {"class_counts": counts})


def checksum_numbers(checksums: NDArray[np.uint32]) -> Numbers:
    """Return the checksums, uint32 ``[N]``, to be written."""
    return Numbers(CHECKSUMS, checksums_metadata(len(checksums)), NUMBERS, checksums, {})


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
