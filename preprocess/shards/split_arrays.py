"""Opens the pixels and checksums of a split as its manifest describes them, and describes its labels or targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorstore as ts

from loopfeed.preprocess.shards.arrays import (
    CHECKSUMS,
    PIXELS,
    checksums_metadata,
    labels_metadata,
    pixels_metadata,
    read_array,
    targets_metadata,
)
from loopfeed.preprocess.shards.image_numbers import ImageNumbers
from loopfeed.preprocess.shards.location import Location
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.targets import dtype_of


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
