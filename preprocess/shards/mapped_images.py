"""Images of a local split, read directly from its memory-mapped shard files.

On every read, TensorStore looks up the image in its shard's index, verifies its checksum and copies it. For files in
the page cache, that is most of the work. Here, an image is located and verified once, and a read is a single copy.
Images that are not sound are left to TensorStore, which reports the fault.
"""

from __future__ import annotations

import resource
from itertools import repeat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.control_groups import host_memory_bytes
from loopfeed.preprocess.read_meter import CHECK, READ, ReadMeter
from loopfeed.preprocess.shards.arrays import PIXELS
from loopfeed.preprocess.shards.checksum import CHECKSUM_BYTES
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.mapped_shards import (
    MOST_MAPPED,
    ExpectedChecksums,
    MappedShard,
    MappedShards,
    read_pages,
)

# Smaller images are gathered with one call per shard, which copies them twice, because a call per image costs 2 µs. A
# call per shard costs 10 µs, so it pays off only for several images.
_LEAST_ONE_BY_ONE_BYTES = 1 << 14
_LEAST_GATHERED = 4
# The fraction of the process's open-file limit that a split with small images may use; a run reads two splits.
_OPEN_SHARE = 1 / 4
# The fraction of this machine's memory up to which a split's images are assumed to stay in memory once read. Other
# splits and the program need memory too.
_STAYING_SHARE = 0.4


class MappedImages:
    """The memory-mapped pixels of one split, readable from any number of threads.

    Args:
        folder: the local folder of the split.
        manifest: the manifest of the split, for which `is_mappable` must be true.
        expected: returns the checksums stored in the split's ``checksums/``; None if it has none.
        meter: of the threads that read.
    """

    def __init__(self, folder: Path, manifest: Manifest, expected: ExpectedChecksums | None, meter: ReadMeter) -> None:
        self._meter = meter
        self._image_bytes, self._shard_images = manifest.image_bytes, manifest.shard_images
        self._shards = MappedShards(
            folder / PIXELS,
            rank=3,
            num_chunks=manifest.num_images,
            shard_chunks=manifest.shard_images,
            chunk_shape=(manifest.height, manifest.row_words),
            dtype=np.uint32,
            checksum=manifest.checksum,
            most_open=0 if self.lends else _most_open_files(),
            expected=expected,
            meter=meter,
        )
        self._stays = manifest.num_images * self._image_bytes <= _STAYING_SHARE * (host_memory_bytes() or 0)

    @property
    def lends(self) -> bool:
        """Whether `lend` can return images; if not, `lend` always returns None."""
        return self._image_bytes >= _LEAST_ONE_BY_ONE_BYTES

    @staticmethod
    def is_mappable(manifest: Manifest) -> bool:
        """Return whether the stored pixels need no conversion, i.e. whether they are raw and in native byte order."""
        return manifest.codec == "raw" and MappedShards.is_possible()

    def check_files(self) -> None:
        """Check every mapped file again; raise ChangedFileError if images read from a file have since changed."""
        self._shards.check_files()

    def is_readable(self, shard: int) -> bool:
        """Return whether the system can map a shard file of the right size."""
        return self._shards.find(shard) is not None

    def forget(self, shard: int) -> None:
        """Map a shard file again at its next use, because it was removed."""
        self._shards.forget(shard)

    def copy(
        self, indices: NDArray[np.int64], pixels: NDArray[np.uint32], expected: NDArray[np.uint32] | None
    ) -> NDArray[np.intp]:
        """Copy images into ``pixels``, and verify those that have not been verified yet.

        Args:
            indices: int64 ``[b]``, 0 ≤ index < N.
            pixels: uint32 ``[b, H, row_words]``, overwritten.
            expected: uint32 ``[b]``, the images' checksums; None uses those in the files, if any.

        Returns:
            The rows of ``pixels`` that could not be filled with a sound image, ascending.

        Raises:
            ChangedFileError: a file was written to after images were copied from it.
        """
        num_files = 1 if self.lends else len(np.unique(indices // self._shard_images))
        if self.lends or len(indices) < _LEAST_GATHERED * num_files:
            return self._copy_one_by_one(indices, pixels, expected)
        return self._gather(indices, pixels, expected)

    def _copy_one_by_one(
        self, indices: NDArray[np.int64], pixels: NDArray[np.uint32], expected: NDArray[np.uint32] | None
    ) -> NDArray[np.intp]:
        left, reading = [], self._meter.here()
        own, is_one_piece = bytearray(CHECKSUM_BYTES), pixels.flags.c_contiguous
        checksums = repeat(None) if expected is None else expected.tolist()
        places = self._shards.places(indices)
        for row, (image, (shard, slot), checksum) in enumerate(zip(pixels, places, checksums, strict=False)):
            if shard is None:
                left.append(row)
                continue
            if shard.path is not reading.file:
                reading.visit(shard.path)
            if shard.file is not None and is_one_piece:
                is_sound = shard.read(slot, image, own, checksum, reading)
            else:
                # Copy first: copying releases the interpreter lock, which must not be held while a disk reads.
                np.copyto(image, shard.chunks[slot])
                reading.enter(CHECK)
                is_sound = shard.check(slot, image, checksum)
                reading.enter(READ)
            if not is_sound:
                left.append(row)
        return np.array(left, np.intp)

    def _gather(
        self, indices: NDArray[np.int64], pixels: NDArray[np.uint32], expected: NDArray[np.uint32] | None
    ) -> NDArray[np.intp]:
        is_left, reading = np.ones(len(indices), np.bool), self._meter.here()
        for number, rows, slots in self._shards.by_shard(indices):
            shard = self._shards.find(number)
            if shard is None:
                continue
            reading.visit(shard.path)
            images = shard.chunks[slots]
            if shard.is_torn:
                continue
            pixels[rows] = images
            is_left[rows] = False
            missing = shard.checked.missing(slots).tolist()
            if missing:
                reading.enter(CHECK)
            for place in missing:
                checksum = None if expected is None else int(expected[rows[place]])
                is_left[rows[place]] = not shard.check(int(slots[place]), images[place], checksum)
            if missing:
                reading.enter(READ)
        return np.flatnonzero(is_left)

    def lend(
        self, indices: NDArray[np.int64], expected: NDArray[np.uint32] | None
    ) -> tuple[list[NDArray[np.uint32]], set[MappedShard]] | None:
        """Return views of the mapped images, in the order of ``indices``, and the set of files that contain them.

        Each image is uint32 ``[H, row_words]``, read-only. The images are verified, and their pages are in memory
        unless the system has evicted them. Copies of them are valid only if `is_torn` is false for all files
        afterwards. Returns None if an image is not available, or if images are so small that `copy` is faster.

        Raises:
            ChangedFileError: as `copy`.
        """
        if not self.lends:
            return None
        images, shards, reading = [], set(), self._meter.here()
        checksums = repeat(None) if expected is None else expected.tolist()
        for (shard, slot), checksum in zip(self._shards.places(indices), checksums, strict=False):
            if shard is None:
                return None
            image = shard.chunks[slot]
            if not (self._stays and slot in shard.checked):
                if shard.path is not reading.file:
                    reading.visit(shard.path)
                read_pages(image)
                reading.enter(CHECK)
                is_sound = shard.check(slot, image, checksum)
                reading.enter(READ)
                if not is_sound:
                    return None
            images.append(image)
            shards.add(shard)
        return images, shards


def _most_open_files() -> int:
    """Return the maximum number of files that a split may keep open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int(_OPEN_SHARE * (MOST_MAPPED if most == resource.RLIM_INFINITY else most))
