"""Reads a split's labels, targets or checksums and verifies each shard file against its digest.

The numbers stay in memory, 2 bytes per image for labels, 4 for checksums, and 4 per word for targets. For very large
local splits the files are mapped instead.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.shards.arrays import (
    MAX_NUMBERS_BYTES,
    NUMBERS,
    NumberShards,
    damage,
    read_array,
    shard_key,
    words_digest,
)
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.mapped_shards import MappedShard, MappedShards
from loopfeed.preprocess.system_errors import reading_remedy

HELD_NUMBERS = 1 << 24
"""Splits of up to this many images keep their labels and checksums in memory (96 MiB); of targets, up to this many
words."""


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

    Args:
        location: the split's folder.
        name: name of the array.
        metadata: metadata of the array, see `loopfeed.preprocess.shards.arrays`.
        dtype: type of the numbers.
        digests: SHA-256 of the numbers of each shard file; None if the split has none.
        shards: how the array is divided into shard files.

    Raises:
        ShardError: the array can't be opened.
    """

    def __init__(
        self,
        location: Location,
        name: str,
        metadata: dict[str, Any],
        dtype: type[np.generic],
        digests: tuple[str, ...] | None,
        shards: NumberShards = NUMBERS,
    ) -> None:
        self._location, self._name, self._digests, self._dtype = location, name, digests, dtype
        self._shards = shards
        self._num_images: int = metadata["shape"][0]
        num_numbers = self._num_images * int(np.prod(shards.row))
        self._array = read_array(location, name, metadata)
        self._held: dict[int, NDArray[Any]] = {}
        self._compared: dict[int, _MappedPart] = {}
        self._lock = threading.Lock()
        self._mapped: MappedShards | None = None
        folder = location.local_path
        if folder is not None and MappedShards.is_possible() and num_numbers > HELD_NUMBERS:
            self._mapped = MappedShards(
                folder / name,
                rank=shards.rank,
                num_chunks=-(-self._num_images // shards.per_chunk),
                shard_chunks=shards.per_shard // shards.per_chunk,
                chunk_shape=(shards.per_chunk, *shards.row),
                dtype=dtype,
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
