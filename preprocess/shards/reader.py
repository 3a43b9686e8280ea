"""Reads images of packed splits by index into the caller's buffers.

Knows nothing of order, batches or devices; splits are written by `loopfeed.preprocess.packing.pack`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.read_meter import CHECK, READ, ReadMeter
from loopfeed.preprocess.shards.arrays import (
    CHECKSUMS,
    GROUPS,
    NUMBERS_PER_SHARD,
    PIXELS,
    WEIGHTS,
    damage,
    image_key,
    shard_key,
)
from loopfeed.preprocess.shards.cached_images import CachedImages
from loopfeed.preprocess.shards.decoded_checks import DecodedChecks
from loopfeed.preprocess.shards.file_maps import WatchedFolder
from loopfeed.preprocess.shards.location import STORE_TIMEOUT_S, Location, ShardError, open_location
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.mapped_images import MappedImages
from loopfeed.preprocess.shards.mapped_shards import ChangedFileError, MappedShard
from loopfeed.preprocess.shards.shard_cache import ShardCache
from loopfeed.preprocess.shards.shard_copies import ShardCopies
from loopfeed.preprocess.shards.shard_sizes import check_plausible, describe_truncated
from loopfeed.preprocess.shards.split_arrays import (
    SplitLabels,
    SplitNames,
    are_weights,
    check_buffer,
    check_indices,
    describe_image,
    open_extents,
    open_numbers,
)
from loopfeed.preprocess.shards.splits import list_splits, read_manifest
from loopfeed.preprocess.shards.stored_pixels import StoredPixels, without_maps
from loopfeed.preprocess.system_errors import reading_remedy

__all__ = [
    "ChangedShardError",
    "LentImages",
    "ShardError",
    "ShardSplit",
    "list_splits",
    "open_split",
    "read_manifest",
]

_BLAME_TIMEOUT_S = 10.0
"""Time limit for finding the damaged image after a failed read, in seconds."""

_READ_ERRORS = (ValueError, OSError, RuntimeError)


class ChangedShardError(ShardError):
    """Error raised if a shard file was written to while it was being read. Images already used may have been wrong."""


@dataclass(frozen=True)
class LentImages:
    """Views of images in memory-mapped files, used instead of copies.

    Attributes:
        images: uint32 ``[H, row_words]`` each, read-only.
    """

    images: list[NDArray[np.uint32]]
    _shards: set[MappedShard]
    _split: ShardSplit

    def check(self) -> None:
        """Check that copies of the images are valid; call this after copying.

        Raises:
            ShardError: a file was truncated in the meantime; the copies must not be used.
        """
        for shard in self._shards:
            if shard.is_torn:
                raise ShardError(self._split.truncated_message(shard.path))


class ShardSplit:
    """A complete split that any number of threads can read from; as a context manager, it closes itself on exit.

    Attributes:
        manifest: the manifest of the split.
        num_images: N, the number of images.
        height: H, height of an image in pixels.
        width: W, width of an image in pixels.
        row_words: number of words in a row, W in the packed layout.
        num_classes: K, the number of classes, or of an image's targets.
        target_words: number of 32-bit words of an image's targets; 0 if images have one class each.
        label_row: shape of one image's labels in the caller's buffer: ``()`` for a class, ``(target_words,)`` for
            targets; with whole pictures ``(1 + words,)``, because the word of the picture's place comes before them.
        meter: what the threads that read do, and how long it takes.

    Raises:
        ShardError: an array can't be opened.

    Example:
        >>> with open_split("data", "val") as split:
        ...     pixels, labels = np.zeros((2, split.height, split.width), np.uint32), np.zeros(2, np.int32)
        ...     split.read_into(np.array([0, 7]), pixels, labels, timeout_s=60)
        >>> labels.tolist(), unpack_rgb(pixels).shape
        ([0, 1], (2, 8, 8, 3))
    """

    def __init__(
        self,
        location: Location,
        manifest: Manifest,
        cache: ShardCache | None = None,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        check_plausible(location, manifest)
        self.manifest = manifest
        self.location = location
        self.meter = ReadMeter(lambda shard: f"{self._name()}/{image_key(shard)}")
        self.num_images = manifest.num_images
        self.height = manifest.height
        self.width = manifest.width
        self.row_words = manifest.row_words
        self.num_classes = manifest.num_classes
        self.target_words = manifest.target_words
        row = (self.target_words,) if self.target_words else ()
        self.label_row = (1 + max(1, self.target_words),) if manifest.is_whole else row
        # Decoded images are not cached: a cache only adds a copy (measured), and the page cache already has the file.
        self._pixels: StoredPixels | None = StoredPixels(location, manifest, notify)
        self._labels: SplitLabels | None = SplitLabels(without_maps(location), manifest)
        self._checksums = open_numbers(without_maps(location), manifest, CHECKSUMS)
        self._extents = open_extents(without_maps(location), manifest)
        self._names: SplitNames | None = None
        self._decoded = DecodedChecks(location, manifest)
        self._mapped: MappedImages | CachedImages | None = None
        folder = location.local_path
        self._watch = None if folder is None else WatchedFolder(folder)
        expected = None if self._checksums is None else self._read_checksums
        if folder is not None and MappedImages.is_mappable(manifest):
            self._mapped = MappedImages(folder, manifest, expected, self.meter)
        elif folder is None and cache is not None:
            self._mapped = CachedImages(cache, location, manifest, expected, self.meter)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the split. Reading then raises ShardError; closing again has no effect."""
        if isinstance(self._mapped, CachedImages):
            self._mapped.close()
        self._pixels = self._labels = self._checksums = self._extents = self._mapped = self._watch = None
        self._names = None

    def read_into(
        self, indices: NDArray[np.int64], pixels: NDArray[np.uint32], labels: NDArray[np.int32], *, timeout_s: float
    ) -> None:
        """Read images and labels into the given buffers, in the order of ``indices``.

        Blocks without holding the interpreter lock; any number of threads may read at once. After a timeout, or if one
        of several images is damaged, the store may still write into ``pixels``: discard that buffer.

        Args:
            indices: int64 ``[b]``, 0 ≤ index < N, any order, repeats allowed.
            pixels: uint32 ``[b, H, row_words]``, aligned, any strides, overwritten with the packed pixels.
            labels: int32 ``[b, *label_row]``, overwritten with classes 0..K-1, or in a split with targets with the
                words of the bits, or of the float32 numbers (see `read_targets`); in a split of whole pictures, the
                word of `loopfeed.preprocess.extents` comes first.
            timeout_s: how long to wait for the store, in seconds.

        Raises:
            ShardError: an index, shape or type is wrong, or a shard is missing, damaged, not the one that was packed,
                or not read in time. The message names the split, the shard file and the remedy; the buffers then
                contain no usable images.
        """
        check_buffer(self._name(), "pixels", pixels, np.uint32, (len(indices), self.height, self.row_words))
        indices = self._checked(indices, labels)
        if not len(indices):
            return
        deadline = time.monotonic() + timeout_s
        stored, reading = self._open_array(), self.meter.here()
        before = reading.enter(READ)
        self._take_labels(indices, labels, deadline)
        expected = self._expected(indices, deadline)
        rows = np.arange(len(indices))
        if self._mapped is not None:
            with self._naming_changed_files():
                rows = self._mapped.copy(indices, pixels, expected)
        if len(rows):
            left = None if expected is None else expected[rows]
            self._read_stored(stored, indices[rows], pixels, rows, left, deadline, timeout_s)
        reading.num_bytes += pixels.nbytes
        reading.enter(before)

    @property
    def lends(self) -> bool:
        """Whether `lend` can return images; if not, `lend` always returns None."""
        return self._mapped is not None and self._mapped.lends

    def lend(self, indices: NDArray[np.int64], labels: NDArray[np.int32], *, timeout_s: float) -> LentImages | None:
        """Read labels into ``labels`` and return views of the memory-mapped images instead of copying them.

        Args:
            indices, labels, timeout_s: as for `read_into`.

        Returns:
            A view for each index; None if the images are small, compressed, remote or damaged, in which case
            `read_into` must be used.

        Raises:
            ShardError: as `read_into`.
        """
        indices = self._checked(indices, labels)
        self._open_array()
        if self._mapped is None or not self._mapped.lends or not len(indices):
            return None
        deadline, reading = time.monotonic() + timeout_s, self.meter.here()
        before = reading.enter(READ)
        expected = self._expected(indices, deadline)
        with self._naming_changed_files():
            lent = self._mapped.lend(indices, expected)
        if lent is not None:
            self._take_labels(indices, labels, deadline)
            reading.num_bytes += len(indices) * self.manifest.image_bytes
        reading.enter(before)
        return None if lent is None else LentImages(*lent, self)

    @property
    def copies(self) -> ShardCopies | None:
        """The copies of the shard files in a cache; None without one."""
        return self._mapped.copies if isinstance(self._mapped, CachedImages) else None

    def read_targets(self, indices: NDArray[np.int64], *, timeout_s: float = STORE_TIMEOUT_S) -> NDArray[np.float32]:
        """Return the targets of images, float32 ``[b, K]``: 0 or 1 for each class, or the numbers.

        Args:
            indices: int64 ``[b]``, 0 ≤ index < N, any order, repeats allowed.
            timeout_s: how long to wait for the store, in seconds.

        Raises:
            ShardError: as `read_into`, or the split has no targets.
        """
        if self._labels is None:
            raise ShardError(self._closed_message())
        with self._naming_changed_files():
            return self._labels.read_targets(self._checked_indices(indices), time.monotonic() + timeout_s)

    def read_classes(self, *, timeout_s: float = STORE_TIMEOUT_S) -> NDArray[np.int32]:
        """Return the class of every image, int32 ``[N]``, of a split without targets.

        Args:
            timeout_s: how long to wait for the store, in seconds.

        Raises:
            ShardError: as `read_into`, or the split is closed.
        """
        if self._labels is None:
            raise ShardError(self._closed_message())
        classes, deadline = np.empty(self.num_images, np.int32), time.monotonic() + timeout_s
        with self._naming_changed_files():
            for start in range(0, self.num_images, NUMBERS_PER_SHARD):
                indices = np.arange(start, min(start + NUMBERS_PER_SHARD, self.num_images), dtype=np.int64)
                self._labels.read_into(indices, classes[indices[0] : indices[-1] + 1], deadline)
        return classes

    def names(self, indices: NDArray[np.int64], *, timeout_s: float = STORE_TIMEOUT_S) -> list[str] | None:
        """Return the names of images: their paths below the split, such as "n01440764/n01440764_18.JPEG".

        They are those of the source, with the class that the source's folder states, whether it was a folder or an
        archive. Bytes that are not UTF-8 are as `os.fsdecode` returns them on Linux (surrogate escapes), so that
        `os.fsencode` gives the name of the file back; show names with `loopfeed.preprocess.printable.printable`. Only
        the shard files with these names are read.

        Args:
            indices: int64 ``[b]``, 0 ≤ index < N, any order, repeats allowed.
            timeout_s: how long to wait for the store, in seconds.

        Returns:
            A name for each index; None if the pack has no names, because an earlier release made it.

        Raises:
            ShardError: as `read_into`, for names.
        """
        if self._pixels is None:
            raise ShardError(self._closed_message())
        indices = self._checked_indices(indices)
        if not self.manifest.has_names:
            return None
        if self._names is None:
            self._names = SplitNames(without_maps(self.location), self.manifest)
        return self._names.read(indices, time.monotonic() + timeout_s)

    def weights(self, *, timeout_s: float = STORE_TIMEOUT_S) -> NDArray[np.float32] | None:
        """Return how often each image is to be drawn, float32 ``[N]``, ≥ 0; None if the pack does not say.

        Raises:
            ShardError: as `read_into`, for weights, or one is negative or not finite.
        """
        weights = self._column(WEIGHTS, timeout_s)
        if weights is not None and (are_invalid := ~are_weights(weights)).any():
            index = int(are_invalid.argmax())
            image = describe_image(without_maps(self.location), self.manifest, index)
            raise ShardError(
                f"{self._name()}: the weight of {image} must be at least 0 and finite, found {weights[index]}; "
                f"{self._remedy()}"
            )
        return weights

    def groups(self, *, timeout_s: float = STORE_TIMEOUT_S) -> NDArray[np.uint32] | None:
        """Return the number of each image's group, uint32 ``[N]``; None if the pack has no groups.

        A group has the same number in all splits of a pack.

        Raises:
            ShardError: as `read_into`, for groups.
        """
        return self._column(GROUPS, timeout_s)

    def _column(self, name: str, timeout_s: float) -> NDArray[Any] | None:
        if self._pixels is None:
            raise ShardError(self._closed_message())
        numbers = open_numbers(without_maps(self.location), self.manifest, name)
        if numbers is None:
            return None
        return numbers.read(np.arange(self.num_images), time.monotonic() + timeout_s)

    def load_numbers(self, *, timeout_s: float) -> None:
        """Read the first shard file of the labels and of the checksums to report any damage before other work begins.

        Raises:
            ShardError: as `read_into`, for labels and checksums.
        """
        first, deadline = np.zeros(1, np.int64), time.monotonic() + timeout_s
        self._expected(first, deadline)
        self._take_labels(first, np.empty((1, *self.label_row), np.int32), deadline)

    def check_unchanged(self) -> None:
        """Recheck every file from which images were copied; call this after the last image has been used.

        Raises:
            ChangedShardError: a file was written to in place, so the images may not have been those that were packed.
        """
        with self._naming_changed_files():
            for files in (self._mapped, self._labels, self._checksums, self._extents):
                if files is not None:
                    files.check_files()

    def truncated_message(self, path: str) -> str:
        """Return the error message for a file that was truncated while it was being read."""
        return f"{printable(path)} was truncated or became unreadable while it was being read; {self._remedy()}"

    @contextmanager
    def _naming_changed_files(self) -> Iterator[None]:
        try:
            yield
        except ChangedFileError as error:
            raise ChangedShardError(
                f"{printable(str(error))} was written to while it was being read, so wrong pixels may have been used "
                f"in the last few seconds. Stop the program that writes to it and restore the file; {self._remedy()}"
            ) from error

    def _expected(self, indices: NDArray[np.int64], deadline: float) -> NDArray[np.uint32] | None:
        """Return the checksums of the images ``indices`` from ``checksums/``, or None if the split has no checksums."""
        if self._checksums is None:
            return None
        with self._naming_changed_files():
            return self._checksums.read(indices, deadline)

    def _read_checksums(self, start: int, stop: int) -> NDArray[np.uint32]:
        assert self._checksums is not None
        return self._checksums.read(np.arange(start, stop), time.monotonic() + STORE_TIMEOUT_S)

    def _read_stored(
        self,
        stored: StoredPixels,
        indices: NDArray[np.int64],
        pixels: NDArray[np.uint32],
        rows: NDArray[np.intp],
        expected: NDArray[np.uint32] | None,
        deadline: float,
        timeout_s: float,
    ) -> None:
        """Read images ``indices`` into ``pixels[rows]`` with TensorStore and verify them against their checksums."""
        shards, reading = np.unique(indices // self.manifest.shard_images), self.meter.here()
        reading.visit((int(shards[0]), len(shards)))
        before = self._decoded.identify(shards)
        num_torn = 0 if self._watch is None else self._watch.num_torn
        try:
            stored.read(indices, pixels, rows, deadline)
        except TimeoutError:
            raise ShardError(self._timeout_message(indices, timeout_s)) from None
        except _READ_ERRORS as error:
            raise ShardError(self._blame(indices, error)) from error
        if self._watch is not None and self._watch.num_torn != num_torn:
            raise ShardError(self._blame(indices, OSError("a file was truncated while it was being read")))
        if expected is None:
            return
        reading.enter(CHECK)
        index = self._decoded.find_mismatch(indices, pixels, rows, expected, before)
        reading.enter(READ)
        if index is not None:
            raise ShardError(f"{self._place(index)} is not the one that was packed there; {self._remedy()}")

    def _take_labels(self, indices: NDArray[np.int64], labels: NDArray[np.int32], deadline: float) -> None:
        """Read labels into ``labels``; raise ShardError if a label is not a valid class."""
        assert self._labels is not None
        with self._naming_changed_files():
            if self._extents is not None:
                labels[:, 0] = self._extents.read(indices, deadline)
                labels = labels[:, 1:] if self.target_words else labels[:, 1]
            self._labels.read_into(indices, labels, deadline)

    def _open_array(self) -> StoredPixels:
        if self._pixels is None:
            raise ShardError(self._closed_message())
        return self._pixels

    def _closed_message(self) -> str:
        return f"{self._name()}: the split is closed; open it again with open_split"

    def _checked(self, indices: NDArray[np.int64], labels: NDArray[np.int32]) -> NDArray[np.int64]:
        check_buffer(self._name(), "labels", labels, np.int32, (len(indices), *self.label_row))
        return self._checked_indices(indices)

    def _checked_indices(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        check_indices(self._name(), indices, self.num_images)
        return indices

    def _blame(self, indices: NDArray[np.int64], error: BaseException) -> str:
        """Return an error message that names the first image that fails when read individually, and its shard file."""
        if (outage := self.location.outage(error)) is not None:
            return f"{self._name()}: {outage}"
        stored = self._open_array()
        deadline = time.monotonic() + _BLAME_TIMEOUT_S
        for index in np.unique(indices).tolist():
            shard = index // self.manifest.shard_images
            if (truncation := describe_truncated(self.location, self.manifest, shard)) is not None:
                return f"{self._place(index)}: {truncation}; {self._remedy()}"
            try:
                stored.array[index].read().result(timeout=max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return f"{self._name()}: {damage(error)}; {reading_remedy(error, self._remedy())}"
            except _READ_ERRORS as cause:
                return f"{self._place(index)}: {damage(cause)}; {reading_remedy(cause, self._remedy())}"
        return f"{self._name()}: {damage(error)} (a second read succeeded); check the disk or the network"

    def _timeout_message(self, indices: NDArray[np.int64], timeout_s: float) -> str:
        shards = np.unique(indices // self.manifest.shard_images)
        first = shard_key(int(shards[0]), 3)
        more = f" and {len(shards) - 1} more" if len(shards) > 1 else ""
        return (
            f"{self._name()}: no response within {timeout_s:g} s for {quantity(len(indices), 'image')} of "
            f"{PIXELS}/{first}{more}; "
            "check the disk or the network, or allow more time"
        )

    def _place(self, index: int) -> str:
        """Return the split, the image by index and name, and its shard file, for a message."""
        image = describe_image(without_maps(self.location), self.manifest, index)
        return f"{self._name()}: {image} in {image_key(index // self.manifest.shard_images)}"

    def _name(self) -> str:
        return self.location.display.rstrip("/")

    def _remedy(self) -> str:
        return self.location.remedy


def open_split(
    data: str | os.PathLike[str],
    split: str,
    *,
    context: ts.Context | None = None,
    storage_options: Mapping[str, str] | None = None,
    cache: ShardCache | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> ShardSplit:
    """Open the complete split ``split`` of the pack at ``data``.

    Args:
        data: a folder or a TensorStore URL, as given to ``preprocess-imagenet``.
        split: name of the split, e.g. ``train``.
        context: TensorStore's shared resources; needed only for ``memory://``.
        storage_options: how to reach a remote store, such as ``{"endpoint": "http://127.0.0.1:9000"}``.
        cache: keeps copies of the shard files of a remote store; no effect on a folder of this machine.
        notify: called once, from any thread, with a line of text if files of this machine can't be mapped.

    Raises:
        ShardError: the split does not exist, is unfinished (has no manifest), has a newer format version, or can't be
            accessed.

    Example:
        >>> with open_split("data", "val") as split:
        ...     split.num_images, split.height, split.num_classes
        (8, 8, 2)
    """
    location = open_location(os.fspath(data), context=context, memory_mapped=True, storage_options=storage_options)
    return ShardSplit(location.child(split), read_manifest(location, split), cache, notify)
