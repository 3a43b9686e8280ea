"""Images of a split copied straight from its mapped shard files, once TensorStore has read and checked them.

TensorStore reads and decodes anew on every read, and sums up the bytes for the checksum; of files in the page cache
that is most of the work. Here an image's first read is TensorStore's, with every check that it makes, and each further
one a copy from the file, for as long as that file is the same one. Knows the order of bytes in a shard (Zarr version 3,
codec `sharding_indexed`), not what they mean.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from preprocess.arrays import PIXELS, shard_key
from preprocess.manifest import Manifest

_CHECKSUM_BYTES = 4
# Linux lets a process map 65,530 files; the shards beyond these stay with TensorStore.
_MOST_MAPPED = 1 << 14
# Smaller images are gathered by one call a shard, for which they are copied twice: a call an image costs 2 µs.
_LEAST_ONE_BY_ONE_BYTES = 1 << 14
# Of every page of an image one word is read: 4 KiB are the smallest pages there are.
_PAGE_WORDS = 1 << 10


class Identity(NamedTuple):
    """What tells a file from one that takes its place: inode, size in bytes, time of the last change in ns."""

    inode: int
    size_bytes: int
    changed_ns: int


class _MappedShard(NamedTuple):
    path: str
    identity: Identity
    images: NDArray[np.uint32]  # [n, H, W], in the file
    is_checked: bytearray  # 1 of each image that was, else 0; n of them

    def is_there(self) -> bool:
        """Whether the file is still the one that is mapped."""
        return _identify(self.path) == self.identity


class MappedImages:
    """The mapped shard files of one split; for any number of threads.

    A file that is replaced is told by its identity, and read by TensorStore again. One that is cut off in its place
    while an image is copied from it ends the process (SIGBUS), as with any mapped file.

    Args:
        folder: of the split, on this machine.
        manifest: of the split, which must be `is_mappable`.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder / PIXELS, manifest
        self._image_bytes = 4 * manifest.height * manifest.width
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
        """Copies the images that were checked before, without holding the interpreter lock for large ones.

        Args:
            indices: int64 ``[b]``, 0 ≤ index < N.
            pixels: uint32 ``[b, H, W]``, written where an image was copied.

        Returns:
            The rows of ``pixels`` that are still to be read, ascending.
        """
        copy = self._copy_one_by_one if self.lends else self._gather
        return copy(indices, pixels)

    def _copy_one_by_one(self, indices: NDArray[np.int64], pixels: NDArray[np.uint32]) -> NDArray[np.intp]:
        numbers, slots = np.divmod(indices, self._manifest.shard_images)
        there: dict[int, _MappedShard | None] = {}
        left = []
        for row, (number, slot) in enumerate(zip(numbers.tolist(), slots.tolist(), strict=True)):
            if number not in there:
                there[number] = self._find(number)
            shard = there[number]
            if shard is not None and shard.is_checked[slot]:
                np.copyto(pixels[row], shard.images[slot])
            else:
                left.append(row)
        return np.array(left, np.intp)

    def _gather(self, indices: NDArray[np.int64], pixels: NDArray[np.uint32]) -> NDArray[np.intp]:
        is_left = np.ones(len(indices), np.bool)
        for number, rows, slots in self._by_shard(indices):
            shard = self._find(number)
            if shard is None:
                continue
            is_checked = np.frombuffer(shard.is_checked, np.bool)[slots]
            rows, slots = rows[is_checked], slots[is_checked]
            pixels[rows] = shard.images[slots]
            is_left[rows] = False
        return np.flatnonzero(is_left)

    def _find(self, number: int) -> _MappedShard | None:
        """Gives a mapped shard whose file is still there."""
        shard = self._shards.get(number)
        return shard if shard is not None and shard.is_there() else None

    def lend(self, indices: NDArray[np.int64]) -> list[NDArray[np.uint32]] | None:
        """Gives the images where they lie in the files, uint32 ``[H, W]`` each, read-only, in the order of ``indices``.

        Their pages are brought into memory first. None where an image was not checked yet, or its file is another, or
        they are so small that `copy` is faster.
        """
        if not self.lends:
            return None
        numbers, slots = np.divmod(indices, self._manifest.shard_images)
        shards = {number: self._find(number) for number in np.unique(numbers).tolist()}
        images = []
        for number, slot in zip(numbers.tolist(), slots.tolist(), strict=True):
            shard = shards[number]
            if shard is None or not shard.is_checked[slot]:
                return None
            images.append(shard.images[slot])
        for image in images:
            image.reshape(-1)[::_PAGE_WORDS].max()
        return images

    def identify(self, indices: NDArray[np.int64]) -> dict[int, Identity]:
        """Gives the files that hold the images, by number; to be asked for before TensorStore reads them."""
        numbers = np.unique(indices // self._manifest.shard_images).tolist()
        found = ((number, _identify(self._path(number))) for number in numbers)
        return {number: identity for number, identity in found if identity is not None}

    def learn(self, indices: NDArray[np.int64], identities: Mapping[int, Identity]) -> None:
        """Takes it that TensorStore has read these images, without an error, from these files or newer ones."""
        for number, _, slots in self._by_shard(indices):
            identity = identities.get(number)
            if identity is None or identity != _identify(self._path(number)):
                continue
            with self._lock:
                shard = self._shards.get(number)
                if number not in self._shards or (shard is not None and shard.identity != identity):
                    if len(self._shards) >= _MOST_MAPPED and number not in self._shards:
                        continue
                    shard = self._shards[number] = self._map(number, identity)
                if shard is not None:
                    np.frombuffer(shard.is_checked, np.bool)[slots] = True

    def _by_shard(self, indices: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.int64]]]:
        """Gives each shard's number, the rows of its images, and their places in it."""
        if not len(indices):
            return
        numbers, slots = np.divmod(indices, self._manifest.shard_images)
        order = np.argsort(numbers, kind="stable")
        starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        for rows in np.split(order, starts[1:]):
            yield int(numbers[rows[0]]), rows, slots[rows]

    def _path(self, number: int) -> str:
        return os.fspath(self._folder / shard_key(number, 3))

    def _map(self, number: int, identity: Identity) -> _MappedShard | None:
        """Maps a file; None where it is none that TensorStore can have read, or its images lie in another order."""
        manifest, path = self._manifest, self._path(number)
        stored_bytes = self._image_bytes + (_CHECKSUM_BYTES if manifest.checksum else 0)
        num_images = min(manifest.shard_images, manifest.num_images - number * manifest.shard_images)
        index_bytes = 16 * manifest.shard_images
        try:
            with Path(path).open("rb") as file:
                if _identity_of(os.fstat(file.fileno())) != identity:
                    return None
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        index_start = len(mapped) - index_bytes - _CHECKSUM_BYTES
        if index_start < num_images * stored_bytes:
            return None
        # Of every image its place in the file and its size, in bytes.
        index = np.frombuffer(mapped, "<u8", 2 * num_images, index_start).reshape(num_images, 2)
        start = int(index[0, 0])
        expected = np.stack([start + stored_bytes * np.arange(num_images), np.full(num_images, stored_bytes)], axis=1)
        if (
            not np.array_equal(index, expected.astype(np.uint64))
            or start % 4
            or start + num_images * stored_bytes > index_start
        ):
            return None
        images = np.ndarray(
            (num_images, manifest.height, manifest.width),
            np.uint32,
            mapped,
            offset=start,
            strides=(stored_bytes, 4 * manifest.width, 4),
        )
        # Without checksums there is none but the index's, which the first read of the file has seen.
        is_checked = bytearray(num_images) if manifest.checksum else bytearray(b"\1" * num_images)
        return _MappedShard(path, identity, images, is_checked)


def _identify(path: str) -> Identity | None:
    try:
        return _identity_of(os.stat(path))  # noqa: PTH116 - a Path costs three times as much, once a shard and batch
    except OSError:
        return None


def _identity_of(found: os.stat_result) -> Identity:
    return Identity(found.st_ino, found.st_size, found.st_mtime_ns)
