"""Opens the pixels and checksums of a split as its manifest describes them, and describes its labels or targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.arrays import (
    CHECKSUMS,
    NUMBERS_PER_SHARD,
    PIXELS,
    checksums_metadata,
    labels_metadata,
    pixels_metadata,
    read_array,
    targets_metadata,
)
from loopfeed.preprocess.shards.image_numbers import ImageNumbers
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.targets import dtype_of, unpack_bits


def open_pixels(location: Location, manifest: Manifest) -> ts.TensorStore:
    """Open the uint32 pixel array ``[N, H, row_words]`` of the split at ``location``; raise ShardError on failure."""
    return read_array(location, PIXELS, pixel_metadata(manifest))


def pixel_metadata(manifest: Manifest) -> dict[str, Any]:
    """Return the Zarr metadata of the array with the pixels."""
    return pixels_metadata(
        manifest.num_images,
        manifest.height,
        manifest.row_words,
        shard_images=manifest.shard_images,
        codec=manifest.codec,
        checksum=manifest.checksum,
    )


def label_metadata(manifest: Manifest) -> dict[str, Any]:
    """Return the Zarr metadata of the array with the labels, ``labels/`` or ``targets/``."""
    if manifest.targets is None:
        return labels_metadata(manifest.num_images)
    return targets_metadata(manifest.num_images, manifest.target_words, dtype_of(manifest.targets.kind))


def open_checksums(location: Location, manifest: Manifest) -> ImageNumbers | None:
    """Open the uint32 image checksums of the split at ``location``; return None if the split has none."""
    if not manifest.checksum_digests:
        return None
    return ImageNumbers(
        location, CHECKSUMS, checksums_metadata(manifest.num_images), np.uint32, manifest.checksum_digests
    )


class SplitLabels(ImageNumbers):
    """The labels or targets of the split at ``location``, readable from any number of threads.

    Attributes:
        row: the shape of one image's labels: ``()`` for a class, ``(words,)`` for targets.

    Raises:
        ShardError: the array can't be opened.
    """

    def __init__(self, location: Location, manifest: Manifest) -> None:
        digests = manifest.label_digests or None
        if digests is None and manifest.num_images <= NUMBERS_PER_SHARD:
            digests = (manifest.labels_digest,)  # version 1; for a single file the digest is the same
        dtype = np.uint16 if manifest.targets is None else dtype_of(manifest.targets.kind)
        metadata, shards = label_metadata(manifest), manifest.label_shards
        super().__init__(location, manifest.label_array, metadata, dtype, digests, shards)
        self._manifest, self.row = manifest, shards.row

    def read_into(self, indices: NDArray[np.int64], labels: NDArray[np.int32], deadline: float) -> None:
        """Read the labels of the images ``indices`` into ``labels``, int32 ``[b, *row]``.

        Raises:
            ShardError: as `ImageNumbers.read`, or a label is not a valid class.
            ChangedFileError: a mapped file was written to after labels were read from it.
        """
        found = self.read(indices, deadline)
        if self._manifest.targets is not None:
            labels[:] = found.view(np.int32)
            return
        labels[:] = found
        num_classes = self._manifest.num_classes
        if found.max() >= num_classes:
            index = int(indices[int(found.argmax())])
            raise ShardError(
                f"{self._where}: label {found.max()} of image {index} is not one of the "
                f"{quantity(num_classes, 'class')}; "
                f"{self._location.remedy}"
            )

    def read_targets(self, indices: NDArray[np.int64], deadline: float) -> NDArray[np.float32]:
        """Return the targets of images, float32 ``[b, K]``; raise ShardError as `read_into`, or if there are none."""
        targets = self._manifest.targets
        if targets is None:
            raise ShardError(f"{self._where}: the images have one class each, not targets; read them with read_into")
        words = np.empty((len(indices), *self.row), np.int32)
        if len(indices):
            self.read_into(indices, words, deadline)
        if targets.kind == "numbers":
            return words.view(np.float32)
        return unpack_bits(words.view(np.uint32), self._manifest.num_classes).astype(np.float32)

    @property
    def _where(self) -> str:
        return self._location.display.rstrip("/")
