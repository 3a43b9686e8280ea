"""Images of a remote split whose shard files are being copied to this machine, read from the copies that are there.

Images without a sound copy are left to the store. The copies are verified as local shard files are.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from loopfeed.preprocess.read_meter import CHECK, READ, ReadMeter
from loopfeed.preprocess.shards.arrays import PIXELS, image_key, start_reading
from loopfeed.preprocess.shards.decoded_checks import DecodedChecks
from loopfeed.preprocess.shards.file_maps import can_map_files
from loopfeed.preprocess.shards.location import Location, ShardError, open_location
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.mapped_images import MappedImages
from loopfeed.preprocess.shards.mapped_shards import ExpectedChecksums, MappedShard
from loopfeed.preprocess.shards.shard_cache import ShardCache
from loopfeed.preprocess.shards.shard_copies import ShardCopies
from loopfeed.preprocess.shards.split_arrays import pixel_metadata

_DISK_TIMEOUT_S = 60.0


class CachedImages:
    """The copies of one split's images, readable from any number of threads.

    Args:
        cache: the cache.
        split: the folder of the split, in a store.
        manifest: its manifest.
        expected: returns the checksums stored in the split's ``checksums/``; None if it has none.
        meter: of the threads that read.

    Attributes:
        copies: the copies of the shard files.
    """

    def __init__(
        self,
        cache: ShardCache,
        split: Location,
        manifest: Manifest,
        expected: ExpectedChecksums | None,
        meter: ReadMeter,
    ) -> None:
        digest = hashlib.sha256(manifest.to_json().encode()).hexdigest()
        self.copies = ShardCopies(cache, split, manifest, digest)
        self._folder, self._manifest = cache.folder / digest, manifest
        self._images: MappedImages | _DecodedImages
        if MappedImages.is_mappable(manifest) and can_map_files(cache.folder):
            self._images = MappedImages(self._folder, manifest, expected, meter)
        else:
            self._images = _DecodedImages(self._folder, manifest, meter)

    @property
    def lends(self) -> bool:
        """Whether `lend` can return images; if not, `lend` always returns None."""
        return self._images.lends

    def check_files(self) -> None:
        """Check every mapped copy again; raise ChangedFileError if images read from it have since changed."""
        self._images.check_files()

    def copy(
        self, indices: NDArray[np.int64], pixels: NDArray[np.uint32], expected: NDArray[np.uint32] | None
    ) -> NDArray[np.intp]:
        """Copy images into ``pixels`` and return the rows that are left to the store; as `MappedImages.copy`.

        Shards without a copy are copied in the background.
        """
        shards = self._shards_of(indices)
        self.copies.request(shards)
        present = {shard for shard in shards if self.copies.is_present(shard)}
        left = self._images.copy(indices, pixels, expected)
        for shard in present.intersection(self._shards_of(indices[left])):
            self._check(shard)
        return left

    def lend(
        self, indices: NDArray[np.int64], expected: NDArray[np.uint32] | None
    ) -> tuple[list[NDArray[np.uint32]], set[MappedShard]] | None:
        """Return views of the images, or None if some have no sound copy; as `MappedImages.lend`."""
        shards = self._shards_of(indices)
        self.copies.request(shards)
        if not all(map(self.copies.is_present, shards)):
            return None
        return self._images.lend(indices, expected)

    def close(self) -> None:
        """Stop copying."""
        self.copies.close()

    def _shards_of(self, indices: NDArray[np.int64]) -> list[int]:
        """Return the numbers of the shards of images, in the order of their first images."""
        return list(dict.fromkeys((indices // self._manifest.shard_images).tolist()))

    def _check(self, shard: int) -> None:
        """Remove a copy from which an image could not be read, unless the system is to blame."""
        size = None
        with suppress(OSError):
            size = os.stat(self._folder / image_key(shard)).st_size  # noqa: PTH116 - a path is slower
        if size is None:
            self.copies.forget(shard)
        elif size != (self._manifest.shard_bytes(shard) or size) or self._images.is_readable(shard):
            self.copies.report_damage(shard)
            self._images.forget(shard)


class _DecodedImages:
    """Copies of compressed or unmappable shard files, read by TensorStore; with the methods of `MappedImages`."""

    lends = False

    def __init__(self, folder: Path, manifest: Manifest, meter: ReadMeter) -> None:
        self._manifest, self._meter = manifest, meter
        self._location = open_location(str(folder))
        self._checks = DecodedChecks(self._location, manifest)
        self._stored: ts.TensorStore | None = None

    def check_files(self) -> None:
        """Do nothing: every read opens its file."""

    def is_readable(self, shard: int) -> bool:
        """Return True: no image of a sound copy is left."""
        del shard
        return True

    def forget(self, shard: int) -> None:
        """Do nothing: every read opens its file."""

    def lend(self, *_: Any) -> None:
        """Return None."""

    def copy(
        self, indices: NDArray[np.int64], pixels: NDArray[np.uint32], expected: NDArray[np.uint32] | None
    ) -> NDArray[np.intp]:
        """Read images into ``pixels`` and return the rows that could not be read."""
        shards = indices // self._manifest.shard_images
        left = np.ones(len(indices), np.bool)
        for shard in np.unique(shards).tolist():
            rows = np.flatnonzero(shards == shard)
            with suppress(ShardError, ValueError, OSError, RuntimeError):
                left[rows] = not self._read(indices[rows], pixels, rows, None if expected is None else expected[rows])
        return np.flatnonzero(left)

    def _read(
        self,
        indices: NDArray[np.int64],
        pixels: NDArray[np.uint32],
        rows: NDArray[np.intp],
        expected: NDArray[np.uint32] | None,
    ) -> bool:
        """Read images of one shard, and return whether all match their checksums."""
        before = self._checks.identify(np.unique(indices // self._manifest.shard_images))
        if None in before.values():
            return False
        reading = self._meter.here()
        reading.enter(READ)
        reading.visit((int(indices[0]) // self._manifest.shard_images, 1))
        start_reading(self._open(), indices, pixels, rows).result(timeout=_DISK_TIMEOUT_S)
        if expected is None:
            return True
        reading.enter(CHECK)
        is_sound = self._checks.find_mismatch(indices, pixels, rows, expected, before) is None
        reading.enter(READ)
        return is_sound

    def _open(self) -> ts.TensorStore:
        if self._stored is None:
            spec = {
                "driver": "zarr3",
                "kvstore": self._location.array_spec(PIXELS),
                "metadata": pixel_metadata(self._manifest),
                "fill_missing_data_reads": False,
                "cache_pool": {"total_bytes_limit": 0},
            }
            mode = ts.OpenMode(open=True, assume_metadata=True)
            self._stored = ts.open(spec, open_mode=mode).result(timeout=_DISK_TIMEOUT_S)
        return self._stored
