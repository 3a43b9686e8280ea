"""Images of a local split straight from its mapped shard files.

TensorStore finds and decodes an image anew on every read: its shard's index, its checksum, a copy. Of files in the page
cache that is most of the work. Here a shard's index is read once, an image's checksum is computed once, and a read is
one copy. Whatever is not as it should be is left to TensorStore, which says what is wrong. Knows the order of bytes in
a shard (Zarr version 3, codec `sharding_indexed`), not what they mean.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from preprocess.arrays import PIXELS, shard_key
from preprocess.file_maps import map_file
from preprocess.manifest import Manifest
from preprocess.memory import host_memory_bytes
from preprocess.shard_index import CHECKSUM_BYTES, shard_index

# Linux lets a process map 65,530 files, here of two splits; the shards beyond these stay with TensorStore.
_MOST_MAPPED = 3 << 13
# Smaller images are gathered by one call a shard, for which they are copied twice: a call an image costs 2 µs. A call a
# shard costs 10 µs, so it must be for several images.
_LEAST_ONE_BY_ONE_BYTES = 1 << 14
_LEAST_GATHERED = 4
# Every page of an image is read once to bring it into memory, 4 KiB at least, by one call on more than 500 words: for
# so many NumPy lets go of the interpreter lock, which a read from a disk must not hold.
_PAGE_WORDS = 1 << 10
_LEAST_WORDS_READ = 1 << 9
# A call to the system costs 2 µs, a third of the copy of an image.
_LOOK_EVERY_S = 1.0
# Of this machine's memory, the share that a split may have for its images to stay in it once they were read: those of
# others, and the program, need some too.
_STAYING_SHARE = 0.4


# Inode, size in bytes and time of the last change in ns, which tell a file from one that takes its place.
type _Identity = tuple[int, int, int]


@dataclass(slots=True)
class _MappedShard:
    path: str
    identity: _Identity
    images: NDArray[np.uint32]  # [n, H, words of a row], in the file
    checksums: NDArray[np.uint32] | None  # [n], in the file; None where there are none
    checked: NDArray[np.uint8]  # a bit of each image, 1 where it was: a set of 1e8 has 12 MB of them
    looked_s: float  # when it was seen to be the file of that path, on the monotonic clock

    def is_there(self) -> bool:
        """Whether the file is still the one that is mapped, as of a second ago."""
        now_s = time.monotonic()
        if now_s - self.looked_s >= _LOOK_EVERY_S:
            if _identify(self.path) != self.identity:
                return False
            self.looked_s = now_s
        return True

    def check(self, slot: int, image: NDArray[np.uint32]) -> bool:
        """Whether an image, which lies in one piece, has its checksum, if it has one; computed once."""
        if self.is_checked(slot):
            return True
        is_sound = self.checksums is None or google_crc32c.value(image) == int(self.checksums[slot])
        if is_sound:
            # Where two threads mark neighbours at once one mark may be lost: that image is checked again.
            self.checked[slot >> 3] |= 1 << (slot & 7)
        return is_sound

    def is_checked(self, slot: int) -> bool:
        """Whether an image was checked and had its checksum."""
        return bool(self.checked[slot >> 3] >> (slot & 7) & 1)

    def unchecked(self, slots: NDArray[np.int64]) -> NDArray[np.intp]:
        """The places in `slots` of images that were not checked."""
        return np.flatnonzero(self.checked[slots >> 3] >> (slots & 7).astype(np.uint8) & 1 == 0)


class MappedImages:
    """The mapped shard files of one split; for any number of threads.

    A file that is replaced is told by its identity within a second, mapped and checked anew. One that is cut off in its
    place while an image is copied from it ends the process (SIGBUS), as with any mapped file. A page that the system
    has taken back is read again where it is copied, which no time limit can end.

    Args:
        folder: of the split, on this machine.
        manifest: of the split, which must be `is_mappable`.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder / PIXELS, manifest
        self._image_bytes = manifest.image_bytes
        self._stays = manifest.num_images * self._image_bytes <= _STAYING_SHARE * (host_memory_bytes() or 0)
        self._shards: dict[int, _MappedShard | None] = {}  # None: of another form than is mapped
        self._lock = threading.Lock()

    @property
    def lends(self) -> bool:
        """Whether `lend` may ever give something."""
        return self._image_bytes >= _LEAST_ONE_BY_ONE_BYTES

    @staticmethod
    def is_mappable(manifest: Manifest) -> bool:
        """Whether this machine's memory would show the pixels of the files as they are."""
        return manifest.codec == "raw" and sys.byteorder == "little"

    def copy(self, indices: NDArray[np.int64], pixels: NDArray[np.uint32]) -> NDArray[np.intp]:
        """Copies images and checks those that were not checked before.

        Args:
            indices: int64 ``[b]``, 0 ≤ index < N.
            pixels: uint32 ``[b, H, words of a row]``, overwritten.

        Returns:
            The rows of ``pixels`` that hold no sound image, ascending.
        """
        num_files = 1 if self.lends else len(np.unique(indices // self._manifest.shard_images))
        if self.lends or len(indices) < _LEAST_GATHERED * num_files:
            return self._copy_one_by_one(indices, pixels)
        return self._gather(indices, pixels)

    def _copy_one_by_one(self, indices: NDArray[np.int64], pixels: NDArray[np.uint32]) -> NDArray[np.intp]:
        left = []
        for row, (shard, slot) in enumerate(self._places(indices)):
            if shard is None:
                left.append(row)
                continue
            # Copied first: that lets go of the interpreter lock, which the wait for a disk must not hold.
            np.copyto(pixels[row], shard.images[slot])
            if not shard.is_checked(slot) and not shard.check(slot, np.ascontiguousarray(pixels[row])):
                left.append(row)
        return np.array(left, np.intp)

    def _gather(self, indices: NDArray[np.int64], pixels: NDArray[np.uint32]) -> NDArray[np.intp]:
        is_left = np.ones(len(indices), np.bool)
        for number, rows, slots in self._by_shard(indices):
            shard = self._find(number)
            if shard is None:
                continue
            images = shard.images[slots]
            pixels[rows] = images
            is_left[rows] = False
            for place in shard.unchecked(slots).tolist():
                is_left[rows[place]] = not shard.check(int(slots[place]), images[place])
        return np.flatnonzero(is_left)

    def lend(self, indices: NDArray[np.int64]) -> list[NDArray[np.uint32]] | None:
        """Gives the images where they lie in the files, in the order of ``indices``.

        Each is uint32 ``[H, words of a row]``, read-only. They are checked, and their pages in memory, unless the
        system has taken them back. None where that cannot be, or where they are so small that `copy` is faster.
        """
        if not self.lends:
            return None
        images = []
        for shard, slot in self._places(indices):
            if shard is None:
                return None
            image = shard.images[slot]
            if not (self._stays and shard.is_checked(slot)):
                _read_pages(image)
                if not shard.check(slot, image):
                    return None
            images.append(image)
        return images

    def _places(self, indices: NDArray[np.int64]) -> Iterator[tuple[_MappedShard | None, int]]:
        """Gives each image's shard, None where it is not mapped, and its place in it; looks at each file once."""
        numbers, slots = np.divmod(indices, self._manifest.shard_images)
        found: dict[int, _MappedShard | None] = {}
        for number, slot in zip(numbers.tolist(), slots.tolist(), strict=True):
            if number not in found:
                found[number] = self._find(number)
            yield found[number], slot

    def _by_shard(self, indices: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.int64]]]:
        """Gives each shard's number, the rows of its images, and their places in it."""
        if not len(indices):
            return
        numbers, slots = np.divmod(indices, self._manifest.shard_images)
        order = np.argsort(numbers, kind="stable")
        starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        for rows in np.split(order, starts[1:]):
            yield int(numbers[rows[0]]), rows, slots[rows]

    def _find(self, number: int) -> _MappedShard | None:
        """Gives the mapped shard of that number; None where its file is missing, damaged or of another form."""
        shard = self._shards.get(number)
        if shard is not None and shard.is_there():
            return shard
        if shard is None and number in self._shards:
            return None
        with self._lock:
            if self._shards.get(number) is shard and len(self._shards) - (shard is not None) < _MOST_MAPPED:
                self._shards.pop(number, None)
                path = os.fspath(self._folder / shard_key(number, 3))
                # A file that cannot be opened or mapped now may be tomorrow: nothing is kept of it.
                with suppress(OSError):
                    self._shards[number] = self._map(number, path)
            return self._shards.get(number)

    def _map(self, number: int, path: str) -> _MappedShard | None:
        """Maps a file; None where its index is not sound or its images lie in another order than that of their numbers.

        Raises:
            OSError: where it is not there, or the system maps no more.
        """
        manifest = self._manifest
        stored_bytes = self._image_bytes + (CHECKSUM_BYTES if manifest.checksum else 0)
        start, stop = manifest.shard_range(number)
        num_images = stop - start
        index, index_start = shard_index(num_images, manifest.shard_images, stored_bytes), num_images * stored_bytes
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            identity = _identity_of(os.fstat(file))
            # In order from the beginning of the file, the images leave one index that is sound; any other is the
            # store's. Read, not mapped: that lets go of the interpreter lock while the disk is waited for.
            if os.pread(file, len(index) + 1, index_start) != index:
                return None
            mapped = map_file(file, index_start)
        finally:
            os.close(file)
        height, row_words = manifest.height, manifest.row_words
        shape, strides = (num_images, height, row_words), (stored_bytes, 4 * row_words, 4)
        images = np.ndarray(shape, np.uint32, mapped, strides=strides)
        checksums = None
        if manifest.checksum:
            checksums = np.ndarray((num_images,), np.uint32, mapped, offset=self._image_bytes, strides=(stored_bytes,))
        marks = np.zeros(-(-num_images // 8), np.uint8)
        return _MappedShard(path, identity, images, checksums, marks, time.monotonic())


def _read_pages(image: NDArray[np.uint32]) -> None:
    """Brings a mapped image into memory, the interpreter lock let go."""
    words = image.reshape(-1)
    words[:: max(1, min(_PAGE_WORDS, words.size // _LEAST_WORDS_READ))].max()


def _identify(path: str) -> _Identity | None:
    try:
        return _identity_of(os.stat(path))  # noqa: PTH116 - a Path costs three times as much, once a shard and batch
    except OSError:
        return None


def _identity_of(found: os.stat_result) -> _Identity:
    return found.st_ino, found.st_size, found.st_mtime_ns
