"""Opens the arrays of a split (pixels, labels and checksums) as its manifest describes them."""

from __future__ import annotations

import numpy as np
import tensorstore as ts

from preprocess.shards.arrays import (
    CHECKSUMS,
    LABELS,
    NUMBERS_PER_SHARD,
    PIXELS,
    checksums_metadata,
    labels_metadata,
    pixels_metadata,
    read_array,
)
from preprocess.shards.image_numbers import ImageNumbers
from preprocess.shards.location import Location
from preprocess.shards.manifest import Manifest


def open_pixels(location: Location, manifest: Manifest) -> ts.TensorStore:
    """Open the uint32 pixel array ``[N, H, row_words]`` of the split at ``location``; raise ShardError on failure."""
    metadata = pixels_metadata(
        manifest.num_images,
        manifest.height,
        manifest.row_words,
        shard_images=manifest.shard_images,
        codec=manifest.codec,
        checksum=manifest.checksum,
    )
    return read_array(location, PIXELS, metadata)


def open_labels(location: Location, manifest: Manifest) -> ImageNumbers:
    """Open the uint16 labels of the split at ``location``; raise ShardError on failure."""
    digests = manifest.label_digests or None
    if digests is None and manifest.num_images <= NUMBERS_PER_SHARD:
        digests = (manifest.labels_digest,)  # version 1; for a single file the digest is the same
    return ImageNumbers(location, LABELS, labels_metadata(manifest.num_images), np.uint16, digests)


def open_checksums(location: Location, manifest: Manifest) -> ImageNumbers | None:
    """Open the uint32 image checksums of the split at ``location``; return None if the split has none."""
    if not manifest.checksum_digests:
        return None
    return ImageNumbers(
        location, CHECKSUMS, checksums_metadata(manifest.num_images), np.uint32, manifest.checksum_digests
    )
