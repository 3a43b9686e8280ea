"""Opens the arrays of a split as its manifest describes them: its pixels, its labels or targets, and what is beside."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from loopfeed.preprocess.extents import are_outside
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.arrays import (
    EXTENTS,
    MAX_NAME_BYTES,
    MAX_NUMBERS_BYTES,
    NAME_OFFSETS,
    NAMES,
    NUMBERS_PER_SHARD,
    PIXELS,
    TARGETS,
    column_metadata,
    damage,
    pixels_metadata,
    read_array,
    shard_key,
    targets_metadata,
    words_digest,
)
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.mapped_shards import MappedShard, MappedShards
from loopfeed.preprocess.shards.targets import dtype_of, unpack_bits
from loopfeed.preprocess.system_errors import reading_remedy

HELD_NUMBERS = 1 << 24
"""Splits of up to this many images keep their labels and checksums in memory (96 MiB); of targets, up to this many
words."""
_NAMES_AT_ONCE = 1 << 10
_DESCRIBE_TIMEOUT_S = 10.0
_HELD_COMPRESSED_FILES = 4
"""How many shard files of names, and of their offsets, are kept in memory (4 MiB each)."""


# The numbers stay in memory, 2 bytes per image for labels, 4 for checksums, and 4 per word for targets. For very large
# local splits the files are mapped instead.
@dataclass(frozen=True, slots=True)
class _MappedPart:
    """A mapped shard file whose digest was verified."""

    shard: MappedShard
    per_chunk: int

    def take(self, places: NDArray[np.int64]) -> NDArray[Any] | None:
        """Return the numbers at ``places``, or None if the file was truncated after it was mapped."""
        found = self.shard.chunks[places // self.per_chunk, places % self.per_chunk]
        return None if self.shard.is_torn else found


class ImageNumbers:
    """An array with one number or one row of numbers per image, readable from any number of threads.

    ``names/`` and ``name_offsets/``, which are compressed, have one number per byte and one more than images.

    Args:
        location: the split's folder.
        manifest: its manifest.
        name: name of the array.
        digests: SHA-256 of the numbers of each shard file; None for those of the manifest, if it has any.

    Raises:
        ShardError: the array can't be opened.
    """

    def __init__(
        self, location: Location, manifest: Manifest, name: str, digests: tuple[str, ...] | None = None
    ) -> None:
        self._location, self._name, self._shards = location, name, manifest.shards_of(name)
        self._digests = digests or manifest.digests_of(name) or None
        metadata = number_metadata(manifest, name)
        self._dtype = np.dtype(metadata["data_type"])
        self._num_images = manifest.length_of(name)
        num_numbers, shards = self._num_images * int(np.prod(self._shards.row)), self._shards
        self._array = read_array(location, name, metadata)
        self._held: dict[int, NDArray[Any]] = {}
        self._most_held = _HELD_COMPRESSED_FILES if name in (NAMES, NAME_OFFSETS) else None
        self._compared: dict[int, _MappedPart] = {}
        self._lock = threading.Lock()
        self._mapped: MappedShards | None = None
        folder = location.local_path
        is_mappable = self._most_held is None and MappedShards.is_possible()
        if folder is not None and is_mappable and num_numbers > HELD_NUMBERS:
            self._mapped = MappedShards(
                folder / name,
                rank=shards.rank,
                num_chunks=-(-self._num_images // shards.per_chunk),
                shard_chunks=shards.per_shard // shards.per_chunk,
                chunk_shape=(shards.per_chunk, *shards.row),
                dtype=self._dtype.type,
                checksum=True,
            )

    def read(self, indices: NDArray[np.int64], deadline: float) -> NDArray[Any]:
        """Return the numbers ``[b]``, or rows ``[b, words]``, of the images with the given ``indices``.

        Args:
            indices: int64 ``[b]``, 0 ≤ index < N, in any order.
            deadline: time on the monotonic clock at which to stop waiting for the store.

        Raises:
            ShardError: a shard file is missing, damaged, not the one that was packed, or not read in time.
            ChangedFileError: a mapped file was written to after numbers were read from it.
        """
        if self._num_images <= self._shards.per_shard:
            return self._take(0, indices, deadline)
        parts, places = np.divmod(indices, self._shards.per_shard)
        found = np.empty((len(indices), *self._shards.row), self._dtype)
        for part in np.unique(parts).tolist():
            rows = np.flatnonzero(parts == part)
            found[rows] = self._take(part, places[rows], deadline)
        return found

    def check_files(self) -> None:
        """Check every mapped file again; raise ChangedFileError if numbers read from a file have since changed."""
        if self._mapped is not None:
            self._mapped.check_files()

    def _take(self, part: int, places: NDArray[np.int64], deadline: float) -> NDArray[Any]:
        if (held := self._held.get(part)) is not None:
            return held[places]
        if (mapped := self._mapped_part(part)) is not None and (found := mapped.take(places)) is not None:
            return found
        return self._hold(part, deadline)[places]

    def _mapped_part(self, part: int) -> _MappedPart | None:
        """Return the mapped shard file with index ``part``, or None if the file is not mapped or is damaged."""
        shard = None if self._mapped is None else self._mapped.find(part)
        if shard is None:
            return None
        before = self._compared.get(part)
        if before is not None and before.shard is shard:
            return before
        whole = np.array(shard.chunks).reshape(-1, *self._shards.row)[: self._length(part)]
        is_sound = all(shard.check(slot, chunk, None) for slot, chunk in enumerate(shard.chunks))
        if not is_sound or shard.is_torn or not self._is_as_packed(part, whole):
            return None
        self._compared[part] = compared = _MappedPart(shard, self._shards.per_chunk)
        return compared

    def _hold(self, part: int, deadline: float) -> NDArray[Any]:
        """Read the shard file with index ``part`` from the store and keep its numbers in memory."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise ShardError(self._timeout_message(part))
        try:
            if (held := self._held.get(part)) is not None:
                return held
            key = shard_key(part, self._shards.rank)
            self._location.child(self._name).check_regular(key, max_bytes=MAX_NUMBERS_BYTES)
            start = part * self._shards.per_shard
            reading = self._array[start : start + self._length(part)].read()
            try:
                found: NDArray[Any] = reading.result(timeout=max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise ShardError(self._timeout_message(part)) from None
            except (ValueError, OSError, RuntimeError) as error:
                remedy = reading_remedy(error, self._location.remedy)
                fault = self._location.outage(error) or f"{damage(error)}; {remedy}"
                raise ShardError(f"{self._file(part)}: {fault}") from error
            if not self._is_as_packed(part, found):
                raise ShardError(
                    f"{self._file(part)}: the {self._name} differ from those that were packed; {self._location.remedy}"
                )
            if self._most_held is not None and len(self._held) >= self._most_held:
                del self._held[next(iter(self._held))]
            self._held[part] = found
            return found
        finally:
            self._lock.release()

    def _is_as_packed(self, part: int, numbers: NDArray[Any]) -> bool:
        return self._digests is None or words_digest([numbers]) == self._digests[part]

    def _length(self, part: int) -> int:
        return min(self._shards.per_shard, self._num_images - part * self._shards.per_shard)

    def _file(self, part: int) -> str:
        return f"{self._location.display}{self._name}/{shard_key(part, self._shards.rank)}"

    def _timeout_message(self, part: int) -> str:
        return f"{self._file(part)}: not read in time; check the disk or the network, or allow more time"


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


def number_metadata(manifest: Manifest, name: str) -> dict[str, Any]:
    """Return the Zarr metadata of one of the manifest's `number_arrays`."""
    if name == TARGETS:
        assert manifest.targets is not None
        return targets_metadata(manifest.num_images, manifest.target_words, dtype_of(manifest.targets.kind))
    return column_metadata(name, manifest.length_of(name))


def open_numbers(location: Location, manifest: Manifest, name: str) -> ImageNumbers | None:
    """Open one of the arrays of the split at ``location``; return None if the split does not have it."""
    return ImageNumbers(location, manifest, name) if name in manifest.number_arrays else None


def are_weights(numbers: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return which numbers can say how often an image is drawn."""
    return (numbers >= 0) & np.isfinite(numbers)


class SplitNames:
    """The names of the images of the split at ``location``, readable from any number of threads, not mapped.

    Only the shard files with the wanted names are read, and only a few of them are kept in memory.

    Raises:
        ShardError: the arrays can't be opened.
    """

    def __init__(self, location: Location, manifest: Manifest) -> None:
        self._location, self._num_bytes = location, manifest.name_bytes
        self._bytes = ImageNumbers(location, manifest, NAMES)
        self._offsets = ImageNumbers(location, manifest, NAME_OFFSETS)

    def read(self, indices: NDArray[np.int64], deadline: float) -> list[str]:
        """Return the names of the images ``indices``, int64 ``[b]``, as UTF-8; see `ShardSplit.names`.

        Raises:
            ShardError: as `ImageNumbers.read`, or the offsets are not those of names.
        """
        found: dict[int, str] = {}
        wanted = np.unique(indices)
        for first in range(0, len(wanted), _NAMES_AT_ONCE):
            some = wanted[first : first + _NAMES_AT_ONCE]
            starts, stops = (self._offsets.read(each, deadline).astype(np.int64) for each in (some, some + 1))
            lengths = stops - starts
            are_names = (starts >= 0) & (lengths >= 0) & (lengths <= MAX_NAME_BYTES) & (stops <= self._num_bytes)
            if not are_names.all():
                raise ShardError(
                    f"{self._location.display}{NAME_OFFSETS}: the names overlap or are longer than "
                    f"{MAX_NAME_BYTES:,} bytes; {self._location.remedy}"
                )
            places = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
            text = self._bytes.read(places, deadline).tobytes() if len(places) else b""
            ends = np.cumsum(lengths).tolist()
            for index, start, stop in zip(some.tolist(), [0, *ends], ends, strict=False):
                found[index] = text[start:stop].decode("utf-8", "surrogateescape")
        return [found[index] for index in indices.tolist()]


def describe_image(location: Location, manifest: Manifest, index: int) -> str:
    """Return "image 17 (cat/1.jpg)" for a message, or "image 17" if the pack has no names or they can't be read."""
    if manifest.has_names:
        with suppress(ShardError):
            (name,) = SplitNames(location, manifest).read(np.array([index]), time.monotonic() + _DESCRIBE_TIMEOUT_S)
            return f"image {index} ({printable(name)})"
    return f"image {index}"


class SplitExtents(ImageNumbers):
    """The places of whole pictures of the split at ``location``, uint32; see `loopfeed.preprocess.extents`."""

    def __init__(self, location: Location, manifest: Manifest) -> None:
        super().__init__(location, manifest, EXTENTS)
        self._manifest, self._canvas = manifest, (manifest.height, manifest.width)

    def read(self, indices: NDArray[np.int64], deadline: float) -> NDArray[np.uint32]:
        """Read as `ImageNumbers.read`; raise ShardError if a picture is not within its canvas too."""
        found = super().read(indices, deadline)
        if (outside := are_outside(found, *self._canvas)).any():
            height, width = self._canvas
            raise ShardError(
                f"{self._location.display}{EXTENTS}: "
                f"{describe_image(self._location, self._manifest, int(indices[int(outside.argmax())]))} is not within "
                f"its canvas of {width} × {height} pixels; {self._location.remedy}"
            )
        return found


def open_extents(location: Location, manifest: Manifest) -> SplitExtents | None:
    """Open the places of whole pictures of the split at ``location``; return None if it has none."""
    return SplitExtents(location, manifest) if manifest.is_whole else None


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
        super().__init__(location, manifest, manifest.label_array, digests)
        self._manifest, self.row = manifest, self._shards.row

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
                f"{self._where}: label {found.max()} of {describe_image(self._location, self._manifest, index)} is "
                "not one of the "
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


def check_buffer(split: str, name: str, buffer: NDArray[Any], dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    """Raise ShardError, which names the split and the buffer, unless a buffer can be filled as it is."""
    # An unaligned buffer would be copied, and the copy filled instead.
    if buffer.shape != shape or buffer.dtype != dtype or not (buffer.flags.writeable and buffer.flags.aligned):
        lacks = "".join(f", not {flag}" for flag in ("writeable", "aligned") if not getattr(buffer.flags, flag))
        raise ShardError(
            f"{split}: {name} must be a writeable, aligned {np.dtype(dtype).name} {list(shape)}, got {buffer.dtype} "
            f"{list(buffer.shape)}{lacks}; allocate it with the split's height and row_words, or its label_row"
        )


def check_indices(split: str, indices: NDArray[np.int64], num_images: int) -> None:
    """Raise ShardError, which names the split, unless indices are int64 ``[b]`` of its ``num_images`` images."""
    if indices.ndim != 1 or indices.dtype != np.int64:
        raise ShardError(f"{split}: indices must be int64 [b], got {indices.dtype} {list(indices.shape)}")
    if len(indices) and (indices.min() < 0 or indices.max() >= num_images):
        bad = indices.min() if indices.min() < 0 else indices.max()
        raise ShardError(f"{split}: image {bad} is outside 0..{num_images - 1}; give indices of images in this split")
