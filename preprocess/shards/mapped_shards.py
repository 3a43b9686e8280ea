"""Memory-mapped shard files of raw local arrays (Zarr version 3, codec `sharding_indexed`).

Knows the byte layout of a shard and which of its chunks were checked, but not what they mean. A chunk that is misplaced
or does not match its checksum is not returned; the store then reports the fault.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.read_meter import CHECK, OPEN, Reading, ReadMeter
from loopfeed.preprocess.regular_file import FileIdentity, close_quietly, identity_of, open_regular, read_into
from loopfeed.preprocess.shards.arrays import shard_key
from loopfeed.preprocess.shards.checksum import CHECKSUM_BYTES, ENTRY, ChunkMarks, crc32c, shard_index
from loopfeed.preprocess.shards.file_maps import FileMap, map_file

# Linux lets a process map 65,530 files, which two splits share here; further shards are read by the store.
MOST_MAPPED = 3 << 13
# Every page of an array (at least 4 KiB) is touched once to load it, by one call on more than 500 numbers: from that
# size on NumPy releases the interpreter lock, which must not be held during a disk read.
_PAGE_BYTES = 1 << 12
_LEAST_NUMBERS_READ = 1 << 9
# A system call costs 2 to 6 µs, as much as copying an image, so with many files their checks per second are limited.
_LOOK_EVERY_S = 1.0
_MOST_LOOKS_A_S = 1_000

type ExpectedChecksums = Callable[[int, int], NDArray[np.uint32]]
"""Chunks ``start, stop`` → their checksums, uint32 ``[stop - start]``, from a record other than the file itself."""


class ChangedFileError(OSError):
    """Error raised if a write to a mapped file changed chunks that had already been returned."""


class OpenFile:
    """A file descriptor that stays open while it is referenced, so that no thread reads from a reused descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        close_quietly(self.descriptor)


@dataclass(slots=True, eq=False)
class MappedShard:
    """One memory-mapped shard file.

    Attributes:
        path: path of the file.
        identity: identity of the file.
        map: memory map of the file.
        chunks: view of the chunks in the file, ``[n, …]`` of the array's type.
        checksums: view of the chunks' checksums in the file, uint32 ``[n]``; None if it has none.
        misplaced: the indices of chunks that are not where equally sized chunks, stored in order, would be.
        checked: the chunks that were found sound.
        checked_path_s: time on the monotonic clock when the path was last seen to lead to this file.
        file: descriptor to read from; None if too many are open.
    """

    path: str
    identity: FileIdentity
    map: FileMap
    chunks: NDArray[Any]
    checksums: NDArray[np.uint32] | None
    misplaced: frozenset[int]
    checked: ChunkMarks
    checked_path_s: float
    file: OpenFile | None

    @property
    def is_torn(self) -> bool:
        """Whether the file was truncated after it was mapped; if so, data copied from `chunks` may be zeros."""
        return self.map.is_torn

    def read(self, slot: int, chunk: NDArray[Any], checksum: bytearray, expected: int | None, reading: Reading) -> bool:
        """Read a chunk and its checksum from `file` into contiguous memory; return whether the chunk is sound.

        Touching a page of the map for the first time takes 5 µs, which a read avoids.
        """
        assert self.file is not None
        into = (chunk,) if self.checksums is None else (chunk, checksum)
        num_bytes = self.chunks.strides[0]
        try:
            if read_into(self.file.descriptor, into, slot * num_bytes) != num_bytes:
                return False
        except OSError:  # the store will raise it too, and its message names the file
            return False
        if expected is None:
            expected = int.from_bytes(checksum, "little")
        if slot in self.checked:
            return True
        before = reading.enter(CHECK)
        is_sound = self._is_sound(slot, chunk, expected)
        reading.enter(before)
        return is_sound

    def check(self, slot: int, chunk: NDArray[Any], expected: int | None) -> bool:
        """Return whether data copied from ``chunks[slot]`` matches the checksum of that chunk.

        Args:
            slot: number of the chunk in the file.
            chunk: the copy, or the chunk in the file itself.
            expected: the checksum from another record; None uses the file's own, if it has one.
        """
        if slot in self.checked:
            return not self.is_torn
        if expected is None and self.checksums is not None:
            expected = int(self.checksums[slot])
        return self._is_sound(slot, chunk, expected) and not self.is_torn

    def _is_sound(self, slot: int, chunk: NDArray[Any], checksum: int | None) -> bool:
        if slot in self.misplaced:
            return False
        if self.checksums is not None and crc32c(np.ascontiguousarray(chunk)) != checksum:
            return False
        self.checked.add(slot)
        return True


class MappedShards:
    """The memory-mapped shard files of one array, readable from any number of threads.

    A replaced file is detected by its identity within one second per thousand files (at least one second), and mapped
    and checked again. A file that was written to in place is detected similarly: chunks that were returned from it are
    compared with their checksums again, and a changed chunk raises `ChangedFileError`. A file that is truncated while a
    chunk is copied is torn (`loopfeed.preprocess.shards.file_maps`). A page that the system has evicted is read again
    when it is copied, which no time limit can interrupt.

    Args:
        folder: the local folder of the array.
        rank: rank of the array.
        num_chunks: number of chunks of the array, all along its first axis.
        shard_chunks: number of chunks in a full file.
        chunk_shape: shape of a chunk.
        dtype: type of the array, little-endian.
        checksum: whether a CRC-32C follows each chunk.
        most_open: maximum number of mapped files that also stay open for reads; these are the first ones mapped.
        expected: returns checksums of chunks from a record other than the files; None uses those in the files.
        meter: of the threads that read; None keeps its times apart.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        num_chunks: int,
        shard_chunks: int,
        chunk_shape: tuple[int, ...],
        dtype: type[np.generic],
        checksum: bool,
        most_open: int = 0,
        expected: ExpectedChecksums | None = None,
        meter: ReadMeter | None = None,
    ) -> None:
        self._most_open, self._expected = most_open, expected
        self._meter = ReadMeter() if meter is None else meter
        self._folder, self._rank = folder, rank
        self._num_chunks, self._shard_chunks = num_chunks, shard_chunks
        self._shape, self._dtype, self._checksum = chunk_shape, np.dtype(dtype), checksum
        self._shards: dict[int, MappedShard] = {}
        self._of_wrong_size: dict[int, FileIdentity] = {}
        self._changed_path: str | None = None
        self._lock = threading.Lock()

    @staticmethod
    def is_possible() -> bool:
        """Return whether this machine is little-endian, in which case stored numbers need no conversion."""
        return sys.byteorder == "little"

    def places(self, chunks: NDArray[np.int64]) -> Iterator[tuple[MappedShard | None, int]]:
        """Yield each chunk's shard (None if it is not mapped) and its slot in that shard, checking each file once."""
        numbers, slots = np.divmod(chunks, self._shard_chunks)
        found: dict[int, MappedShard | None] = {}
        for number, slot in zip(numbers.tolist(), slots.tolist(), strict=True):
            if number not in found:
                found[number] = self.find(number)
            yield found[number], slot

    def by_shard(self, chunks: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.int64]]]:
        """Yield each shard's index, the positions of its chunks in ``chunks``, and their slots in the shard."""
        if not len(chunks):
            return
        numbers, slots = np.divmod(chunks, self._shard_chunks)
        order = np.argsort(numbers, kind="stable")
        starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        for rows in np.split(order, starts[1:]):
            yield int(numbers[rows[0]]), rows, slots[rows]

    def find(self, number: int) -> MappedShard | None:
        """Return the mapped shard with index ``number``, or None if its file is missing or has the wrong size.

        Raises:
            ChangedFileError: a file was written to in place, and chunks that were returned from it have changed; every
                later call raises it again.
        """
        self._check_unchanged()
        shard = self._shards.get(number)
        if shard is not None and self._is_there(shard):
            return shard
        reading = self._meter.here()
        before = reading.enter(OPEN)
        reading.visit(os.fspath(self._folder / shard_key(number, self._rank)))
        with self._lock:
            if self._shards.get(number) is shard and len(self._shards) - (shard is not None) < MOST_MAPPED:
                self._shards.pop(number, None)
                self._map_again(number, shard)
            self._check_unchanged()
            found = self._shards.get(number)
        reading.enter(before)
        return found

    def forget(self, number: int) -> None:
        """Map a file again at its next use."""
        with self._lock:
            self._shards.pop(number, None)

    def check_files(self) -> None:
        """Check every mapped file again; raise ChangedFileError as `find` does."""
        for number, shard in list(self._shards.items()):
            shard.checked_path_s = -math.inf
            self.find(number)
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        if self._changed_path is not None:
            raise ChangedFileError(self._changed_path)

    def _map_again(self, number: int, before: MappedShard | None) -> None:
        """Map a file that is new or has changed."""
        path = os.fspath(self._folder / shard_key(number, self._rank))
        # A file that cannot be opened or mapped now may be available later, so nothing is recorded about it.
        with suppress(OSError):
            if number in self._of_wrong_size and self._of_wrong_size[number] == _identify(path):
                return
            shard = self._map(number, path)
            if shard is not None:
                self._shards[number] = shard
            elif (found := _identify(path)) is not None:
                self._of_wrong_size[number] = found
        if before is not None and not self._is_as_before(number, before, self._shards.get(number)):
            # Recorded for later calls, because the caller may discard the exception with a step that it never runs.
            self._changed_path = before.path

    def _is_as_before(self, number: int, before: MappedShard, now: MappedShard | None) -> bool:
        """Return True if the chunks already returned are unchanged, or if the path now leads to a different inode."""
        found = _identify(before.path)
        if found is None or found[0] != before.identity[0]:
            return True  # it was replaced or removed; the mapped content stayed the same
        start = number * self._shard_chunks
        for slot in before.checked.slots():
            expected = None if self._expected is None else int(self._expected(start + slot, start + slot + 1)[0])
            if now is None or not now.check(slot, np.array(now.chunks[slot]), expected):
                return False
        return True

    def _is_there(self, shard: MappedShard) -> bool:
        """Return whether the path still leads to the mapped file, as of the latest periodic check."""
        if shard.is_torn:
            return False
        now_s = time.monotonic()
        if now_s - shard.checked_path_s >= max(_LOOK_EVERY_S, len(self._shards) / _MOST_LOOKS_A_S):
            if _identify(shard.path) != shard.identity:
                return False
            shard.checked_path_s = now_s
        return True

    def _map(self, number: int, path: str) -> MappedShard | None:
        """Map a file and return it; return None if the file has the wrong size for its number of chunks.

        Raises:
            OSError: the file is missing, or the system can't map another file.
        """
        num_chunks = min(self._shard_chunks, self._num_chunks - number * self._shard_chunks)
        chunk_bytes = int(np.prod(self._shape)) * self._dtype.itemsize
        stored_bytes = chunk_bytes + (CHECKSUM_BYTES if self._checksum else 0)
        index_start = num_chunks * stored_bytes
        index_bytes = self._shard_chunks * ENTRY.size
        file = OpenFile(open_regular(path))
        identity = identity_of(os.fstat(file.descriptor))
        if identity[1] != index_start + index_bytes + CHECKSUM_BYTES:
            return None
        file_map = map_file(file.descriptor, identity[1])
        mapped = file_map.array
        strides = (stored_bytes, *np.empty((1, *self._shape), self._dtype).strides[1:])
        chunks = np.ndarray((num_chunks, *self._shape), self._dtype, mapped, strides=strides)
        checksums = None
        if self._checksum:
            checksums = np.ndarray((num_chunks,), np.uint32, mapped, offset=chunk_bytes, strides=(stored_bytes,))
        index = mapped[index_start : index_start + index_bytes]
        read_pages(index)
        whole = shard_index(num_chunks, self._shard_chunks, stored_bytes)
        expected = np.frombuffer(whole, np.uint8)[:index_bytes]
        misplaced = () if np.array_equal(index, expected) else np.flatnonzero(index != expected) // ENTRY.size
        return MappedShard(
            path=path,
            identity=identity,
            map=file_map,
            chunks=chunks,
            checksums=checksums,
            misplaced=frozenset(map(int, misplaced)),
            checked=ChunkMarks(num_chunks),
            checked_path_s=time.monotonic(),
            file=file if len(self._shards) < self._most_open else None,
        )


def read_pages(array: NDArray[Any]) -> None:
    """Load a contiguous mapped array into memory with the global interpreter lock released."""
    numbers = array.reshape(-1)
    numbers[:: max(1, min(_PAGE_BYTES // array.itemsize, numbers.size // _LEAST_NUMBERS_READ))].max()


def _identify(path: str) -> FileIdentity | None:
    try:
        return identity_of(os.stat(path))  # noqa: PTH116 - Path takes three times as long, once per shard and batch
    except OSError:
        return None
