"""Reads packed splits: which there are, what they hold, and images by index into ready buffers.

Owns opening and reading. Knows nothing of order, batches or devices; writing is `preprocess.pack`'s.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from preprocess.arrays import (
    LABEL_CACHE_BYTES,
    LABELS,
    LABELS_PER_SHARD,
    PIXELS,
    damage,
    labels_metadata,
    pixels_metadata,
    read_array,
    shard_key,
)
from preprocess.journal import PLAN_KEY
from preprocess.location import Location, ShardError, open_location, reason
from preprocess.manifest import MANIFEST_KEY, Manifest
from preprocess.mapped_images import MappedImages, MappedLabels
from preprocess.mapped_shards import MappedShards

__all__ = ["ShardError", "ShardSplit", "list_splits", "list_unfinished_splits", "open_split"]

HELD_LABELS = 1 << 24
"""Splits of up to so many images keep their labels in memory (32 MiB) once read: a gather takes 10 µs, 128 single reads
through the store 1.8 ms even when cached. Of larger splits they are read from the mapped files where these are local
(0.3 ms), else through a cache of the same size."""

_BLAME_TIMEOUT_S = 10.0
"""How long the damaged image is looked for after a failed read, in seconds."""

_READ_ERRORS = (ValueError, OSError, RuntimeError)


class ShardSplit:
    """One complete split, open for reading from any number of threads. A context manager.

    Attributes:
        manifest: what the split holds.
        num_images: N.
        height: H, rows in pixels.
        width: W, columns in pixels.
        row_words: words of a row, W of the packed layout.
        num_classes: K.
    """

    def __init__(self, location: Location, manifest: Manifest) -> None:
        self.manifest = manifest
        self.location = location
        self.num_images = manifest.num_images
        self.height = manifest.height
        self.width = manifest.width
        self.row_words = manifest.row_words
        self.num_classes = manifest.num_classes
        # Decoded images are not cached: a cache only adds a copy (measured), the page cache already holds the file.
        self._pixels: ts.TensorStore | None = open_pixels(location, manifest)
        self._labels: ts.TensorStore | None = open_labels(location, manifest)
        self._held_labels: NDArray[np.uint16] | None = None
        self._held_labels_lock = threading.Lock()
        folder = location.local_path
        is_mappable = folder is not None and MappedImages.is_mappable(manifest)
        self._mapped = MappedImages(folder, manifest) if folder is not None and is_mappable else None
        self._mapped_labels: MappedLabels | None = None
        if folder is not None and MappedShards.is_possible() and manifest.num_images > HELD_LABELS:
            self._mapped_labels = MappedLabels(folder, manifest.num_images)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the store; reading afterwards is an error. May be called again."""
        self._pixels = self._labels = self._held_labels = self._mapped = self._mapped_labels = None

    def read_into(
        self, indices: NDArray[np.int64], pixels: NDArray[np.uint32], labels: NDArray[np.int32], *, timeout_s: float
    ) -> None:
        """Read images and labels into ready buffers, in the order of ``indices``.

        Blocks without holding the interpreter lock; any number of threads may read at once. When labels fail, the
        pixels under way are awaited within the time limit; after a time-out, or damage among several images, the store
        may still write into ``pixels``: drop that buffer.

        Args:
            indices: int64 ``[b]``, 0 ≤ index < N, any order, repeats allowed.
            pixels: uint32 ``[b, H, row_words]``, aligned, any strides, overwritten with the words of pixels.
            labels: int32 ``[b]``, overwritten with classes 0..K-1.
            timeout_s: how long to wait for the store, in seconds.

        Raises:
            ShardError: an index, shape or type is wrong, or a shard is missing, damaged or not answering. The message
                names the split, the shard file and the remedy; the buffers then hold no usable images.
        """
        self._check_buffer("pixels", pixels, np.uint32, (len(indices), self.height, self.row_words))
        indices = self._checked(indices, labels)
        if not len(indices):
            return
        deadline = time.monotonic() + timeout_s
        stored_pixels, stored_labels = self._arrays()
        mapped = self._mapped
        rows = None if mapped is None else mapped.copy(indices, pixels)
        wanted = indices if rows is None else indices[rows]
        reading_pixels = _start_reading(stored_pixels, wanted, pixels, rows)
        with self._telling_what_failed(indices, timeout_s):
            try:
                found = self._read_labels(stored_labels, indices, deadline)
            except _READ_ERRORS as error:
                if reading_pixels is not None and not isinstance(error, TimeoutError):
                    with suppress(*_READ_ERRORS):
                        reading_pixels.result(timeout=max(0.0, deadline - time.monotonic()))
                raise
            if reading_pixels is not None:
                reading_pixels.result(timeout=max(0.0, deadline - time.monotonic()))
        self._take_labels(indices, found, labels)

    @property
    def lends(self) -> bool:
        """Whether `lend` may ever give something."""
        return self._mapped is not None and self._mapped.lends

    def lend(
        self, indices: NDArray[np.int64], labels: NDArray[np.int32], *, timeout_s: float
    ) -> list[NDArray[np.uint32]] | None:
        """Reads the labels of images in mapped files, and lends the images there in the place of copies.

        Args:
            indices, labels, timeout_s: as `read_into` takes them.

        Returns:
            An array uint32 ``[H, row_words]``, read-only, for each index; None where `read_into` must read them: small
            images, compressed or remote ones, and whatever is damaged.

        Raises:
            ShardError: as `read_into`, of the labels.
        """
        indices = self._checked(indices, labels)
        _, stored_labels = self._arrays()
        images = None if self._mapped is None or not len(indices) else self._mapped.lend(indices)
        if images is None:
            return None
        with self._telling_what_failed(indices, timeout_s):
            found = self._read_labels(stored_labels, indices, time.monotonic() + timeout_s)
        self._take_labels(indices, found, labels)
        return images

    @contextmanager
    def _telling_what_failed(self, indices: NDArray[np.int64], timeout_s: float) -> Iterator[None]:
        """Raises ShardError in the place of the store's errors, naming the file."""
        try:
            yield
        except TimeoutError:
            raise ShardError(self._timeout_message(indices, timeout_s)) from None
        except _READ_ERRORS as error:
            raise ShardError(self._blame(indices, error)) from error

    def _take_labels(self, indices: NDArray[np.int64], found: NDArray[np.uint16], labels: NDArray[np.int32]) -> None:
        """Hands out the labels that were read, and refuses those of no class."""
        labels[:] = found
        if found.max() >= self.num_classes:
            index = int(indices[int(found.argmax())])
            raise ShardError(
                f"{self._name()}: label {found.max()} of image {index} is not one of the {self.num_classes} classes; "
                f"{self._remedy()}"
            )

    def _read_labels(self, stored: ts.TensorStore, indices: NDArray[np.int64], deadline: float) -> NDArray[np.uint16]:
        if self.num_images <= HELD_LABELS:
            if not self._held_labels_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            try:
                held = self._held_labels
                if held is None:
                    held = self._held_labels = stored.read().result(timeout=max(0.0, deadline - time.monotonic()))
                return held[indices]
            except _READ_ERRORS as error:
                # Damage among other images' labels is no reason to refuse these: below they are read by themselves.
                if isinstance(error, TimeoutError):
                    raise
            finally:
                self._held_labels_lock.release()
        mapped = self._mapped_labels
        if mapped is not None and (found := mapped.read(indices)) is not None:
            return found
        with ts.Batch() as batch:
            reading = stored[indices].read(batch=batch)
        return reading.result(timeout=max(0.0, deadline - time.monotonic()))

    def _arrays(self) -> tuple[ts.TensorStore, ts.TensorStore]:
        if self._pixels is None or self._labels is None:
            raise ShardError(f"{self._name()}: the split is closed; open it again with open_split")
        return self._pixels, self._labels

    def _check_buffer(self, name: str, buffer: NDArray[Any], dtype: type[np.generic], shape: tuple[int, ...]) -> None:
        # An unaligned buffer would be copied, and the copy be filled.
        if buffer.shape != shape or buffer.dtype != dtype or not (buffer.flags.writeable and buffer.flags.aligned):
            raise ShardError(
                f"{self._name()}: {name} must be a writeable, aligned {np.dtype(dtype).name} {list(shape)}, "
                f"got {_described(buffer)}; allocate it from the split's height and row_words"
            )

    def _checked(self, indices: NDArray[np.int64], labels: NDArray[np.int32]) -> NDArray[np.int64]:
        self._check_buffer("labels", labels, np.int32, (len(indices),))
        if indices.ndim != 1 or indices.dtype != np.int64:
            raise ShardError(f"{self._name()}: indices must be int64 [b], got {indices.dtype} {list(indices.shape)}")
        if len(indices) and (indices.min() < 0 or indices.max() >= self.num_images):
            bad = indices.min() if indices.min() < 0 else indices.max()
            raise ShardError(f"{self._name()}: image {bad} is outside 0..{self.num_images - 1}; check the order's N")
        return indices

    def _blame(self, indices: NDArray[np.int64], error: BaseException) -> str:
        """Find the first image or label that fails alone, so that the message can name its shard file."""
        stored_pixels, stored_labels = self._arrays()
        deadline = time.monotonic() + _BLAME_TIMEOUT_S
        for index in np.unique(indices).tolist():
            for name, array, shard in (
                (PIXELS, stored_pixels, shard_key(index // self.manifest.shard_images, 3)),
                (LABELS, stored_labels, shard_key(index // LABELS_PER_SHARD, 1)),
            ):
                try:
                    array[index].read().result(timeout=max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    return f"{self._name()}: {damage(error)}; {self._remedy()}"
                except _READ_ERRORS as cause:
                    return f"{self._name()}: image {index} in {name}/{shard}: {damage(cause)}; {self._remedy()}"
        return f"{self._name()}: {reason(error)} (a second read succeeded); check the disk or the network"

    def _timeout_message(self, indices: NDArray[np.int64], timeout_s: float) -> str:
        shards = np.unique(indices // self.manifest.shard_images)
        first = shard_key(int(shards[0]), 3)
        more = f" and {len(shards) - 1} more" if len(shards) > 1 else ""
        return (
            f"{self._name()}: no answer in {timeout_s:g} s for {len(indices)} images of {PIXELS}/{first}{more}; "
            "check the disk or the network, or allow more time"
        )

    def _name(self) -> str:
        return self.location.display.rstrip("/")

    def _remedy(self) -> str:
        return f"`inspect-shards --verify {self._name().rsplit('/', 1)[0]}` lists what is damaged"


def _start_reading(
    stored: ts.TensorStore, indices: NDArray[np.int64], pixels: NDArray[np.uint32], rows: NDArray[np.intp] | None
) -> ts.WriteFutures | None:
    """Begins to read images into a buffer, or into some of its rows; None where there are none to read."""
    if not len(indices):
        return None
    target = ts.array(pixels)
    if rows is not None and len(rows) < len(pixels):
        target = target[rows]
    # Writing from the store into the buffer spares the array that read() allocates: 1.3 to 1.7 times the images
    # per second; the order of the indices then makes no difference.
    with ts.Batch() as batch:
        return target.write(stored[indices], batch=batch)


def _described(buffer: NDArray[np.generic]) -> str:
    lacks = [name for name in ("writeable", "aligned") if not getattr(buffer.flags, name)]
    return f"{buffer.dtype} {list(buffer.shape)}" + "".join(f", not {name}" for name in lacks)


def open_pixels(location: Location, manifest: Manifest) -> ts.TensorStore:
    """The pixels uint32 ``[N, H, row_words]`` of the split in the folder ``location``; see `read_array`."""
    metadata = pixels_metadata(
        manifest.num_images,
        manifest.height,
        manifest.row_words,
        shard_images=manifest.shard_images,
        codec=manifest.codec,
        checksum=manifest.checksum,
    )
    return read_array(location, PIXELS, metadata)


def open_labels(location: Location, manifest: Manifest) -> ts.TensorStore:
    """The labels uint16 ``[N]`` of the split in the folder ``location``; see `read_array`."""
    return read_array(location, LABELS, labels_metadata(manifest.num_images), cache_bytes=LABEL_CACHE_BYTES)


def open_split(data: str, split: str, *, context: ts.Context | None = None) -> ShardSplit:
    """Open the complete split ``split`` of the pack at ``data``.

    Args:
        data: a folder or a TensorStore URL, as given to ``preprocess-imagenet``.
        split: e.g. ``train``.
        context: TensorStore's shared resources; needed for ``memory://`` only.

    Raises:
        ShardError: no such split, an unfinished one (it has no manifest), a newer format version, or no access.
    """
    location = open_location(data, context=context, memory_mapped=True)
    return ShardSplit(location.child(split), read_manifest(location, split))


def read_manifest(location: Location, split: str) -> Manifest:
    """The manifest of ``split`` in the pack at ``location``; raises as `open_split`."""
    folder = location.child(split)
    text = folder.read(MANIFEST_KEY)
    if text is not None:
        return Manifest.from_json(text, where=f"{folder.display}{MANIFEST_KEY}")
    if folder.read(PLAN_KEY) is not None:
        raise ShardError(
            f"{folder.display}: the split is not complete, it has no {MANIFEST_KEY}; "
            "run the same preprocess-imagenet command again, it continues where it stopped"
        )
    complete = _complete_splits(location)
    if complete:
        raise ShardError(f"{location.display}: there is no split {split!r}; choose one of {', '.join(complete)}")
    if location.read(MANIFEST_KEY) is not None:
        raise ShardError(f"{location.display} is a split itself; name the folder that holds it")
    path = location.local_path
    if path is not None and not path.exists():
        raise ShardError(
            f"{location.display.rstrip('/')} does not exist; pack it with `preprocess-imagenet SOURCE DEST`"
        )
    if path is not None and not path.is_dir():
        raise ShardError(f"{location.display.rstrip('/')} must be the folder of a pack, and is a file")
    source = location.display.rstrip("/") if path is not None and any(path.iterdir()) else "SOURCE"
    raise ShardError(f"{location.display} holds no pack; make one: preprocess-imagenet {source} DEST")


def list_splits(data: str, *, context: ts.Context | None = None) -> tuple[str, ...]:
    """Names of the complete splits of the pack at ``data``, ``train`` first, then by name; empty if there is none.

    Raises:
        ShardError: the store can't be reached.
    """
    return _complete_splits(open_location(data, context=context))


def list_unfinished_splits(data: str, *, context: ts.Context | None = None) -> tuple[str, ...]:
    """Names of the splits at ``data`` whose packing was begun and not finished; raises as `list_splits`."""
    location = open_location(data, context=context)
    complete = _complete_splits(location)
    return tuple(name for name in _folders_with(location, PLAN_KEY) if name not in complete)


def _complete_splits(location: Location) -> tuple[str, ...]:
    return _folders_with(location, MANIFEST_KEY)


def _folders_with(location: Location, key: str) -> tuple[str, ...]:
    folder = location.local_path
    if folder is not None:
        names = [path.name for path in folder.glob("*/") if (path / key).is_file()]
    else:
        paths = [path.split("/", 1) for path in location.list_keys()]
        names = [path[0] for path in paths if path[1:] == [key]]
    return tuple(sorted(names, key=lambda name: (name != "train", name)))
