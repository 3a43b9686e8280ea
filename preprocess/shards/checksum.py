"""CRC-32C (Castagnoli), the checksum of the shard format.

Computed by google-crc32c, which takes 0.2 µs for 4 KiB. Where it is not installed, NumPy is used, which is about a
hundred times slower: it computes the sums of many pieces at once and combines them (Gopal et al., 2011, "Fast CRC
computation for iSCSI polynomial using CRC32 instruction").

Of a shard file of raw images whose images all have the same size and are stored in order from the start, the index at
the end (Zarr version 3, codec `sharding_indexed`) is known in advance. Which chunks of it have been verified takes one
bit per chunk, to save memory in a split of 10^8 images.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import google_crc32c
except ImportError:
    google_crc32c = None  # type: ignore[assignment]

_POLYNOMIAL = 0x82F63B78  # bits in transmission order
_ONES = 0xFFFFFFFF
_LOG_PIECE_BYTES = 6

type _Operator = NDArray[np.uint32]
"""uint32 ``[4, 256]``: the effect on a sum of appending zero bytes, one table for each byte of the sum."""


def crc32c(data: NDArray[Any] | bytes) -> int:
    """Return the CRC-32C of a contiguous array or of bytes."""
    if google_crc32c is not None:
        return int(google_crc32c.value(data))
    return _by_pieces(np.frombuffer(data, np.uint8))


def _by_pieces(data: NDArray[np.uint8]) -> int:
    if len(data) < 4:
        return _one_by_one(data)
    piece_bytes = 1 << _LOG_PIECE_BYTES
    num_pieces = 1 << (-(-len(data) // piece_bytes) - 1).bit_length()
    # Leading zeros do not change a sum that starts at zero, and starting at ones is the same as inverting four bytes.
    padded = np.zeros(num_pieces * piece_bytes, np.uint8)
    padded[-len(data) :] = data
    padded[-len(data) :][:4] ^= 0xFF
    columns = padded.reshape(num_pieces, piece_bytes).T
    sums, table = np.zeros(num_pieces, np.uint32), _zero_bytes(0)[0]
    for column in columns:
        sums = table[(sums ^ column) & 0xFF] ^ (sums >> 8)
    log_bytes = _LOG_PIECE_BYTES
    while len(sums) > 1:
        sums = _apply(_zero_bytes(log_bytes), sums[0::2]) ^ sums[1::2]
        log_bytes += 1
    return int(sums[0]) ^ _ONES


def _one_by_one(data: NDArray[np.uint8]) -> int:
    table, total = _zero_bytes(0)[0], _ONES
    for byte in data.tolist():
        total = int(table[(total ^ byte) & 0xFF]) ^ (total >> 8)
    return total ^ _ONES


@lru_cache
def _zero_bytes(log_count: int) -> _Operator:
    """Return lookup tables that update a CRC as if ``2**log_count`` zero bytes were appended."""
    if log_count:
        half = _zero_bytes(log_count - 1)
        return _apply(half, half)
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = np.where(first & 1, (first >> 1) ^ np.uint32(_POLYNOMIAL), first >> 1)
    # The three bytes that are not shifted out only move.
    moved = [np.arange(256, dtype=np.uint32) << np.uint32(8 * (place - 1)) for place in (1, 2, 3)]
    return np.stack([first, *moved])


def _apply(operator: _Operator, sums: NDArray[np.uint32]) -> NDArray[np.uint32]:
    result = operator[0][sums & 0xFF]
    for place in (1, 2, 3):
        result = result ^ operator[place][(sums >> np.uint32(8 * place)) & 0xFF]
    return result


CHECKSUM_BYTES = 4
ENTRY = struct.Struct("<QQ")
"""Offset of a chunk in the file and its size, in bytes."""
_MISSING = 2**64 - 1


@lru_cache(maxsize=4)
def shard_index(num_images: int, shard_images: int, stored_bytes: int) -> bytes:
    """Return the index (the offset and the size of each image, in bytes), followed by the checksum of the index.

    Args:
        num_images: number of images in the file.
        shard_images: number of images in a full shard; the missing ones are marked in the index.
        stored_bytes: size of one image in the file, including its checksum if it has one.
    """
    index = np.full((shard_images, 2), _MISSING, "<u8")
    index[:num_images, 0] = stored_bytes * np.arange(num_images, dtype=np.uint64)
    index[:num_images, 1] = stored_bytes
    return index.tobytes() + crc32c(index).to_bytes(CHECKSUM_BYTES, "little")


def end_of_chunks(index: bytes) -> int | None:
    """Return where the last chunk ends in a shard with this index and its checksum; None if the index is damaged."""
    entries, checksum = index[:-CHECKSUM_BYTES], int.from_bytes(index[-CHECKSUM_BYTES:], "little")
    if crc32c(np.frombuffer(entries, np.uint8)) != checksum:
        return None
    chunks = np.frombuffer(entries, "<u8").reshape(-1, 2)
    there = chunks[chunks[:, 0] != _MISSING]
    return int(there.sum(axis=1).max()) if len(there) else 0


class ChunkMarks:
    """A set of chunk indices in one file, usable from any number of threads.

    If two threads mark neighbouring chunks at the same time, one mark may be lost; that chunk is then checked again.

    Args:
        num_chunks: number of chunks in the file; their indices are 0 to ``num_chunks - 1``.
    """

    def __init__(self, num_chunks: int) -> None:
        self._bits = np.zeros(-(-num_chunks // 8), np.uint8)

    def __contains__(self, slot: int) -> bool:
        return bool(self._bits[slot >> 3] >> (slot & 7) & 1)

    def add(self, slot: int) -> None:
        """Mark the chunk with index ``slot``."""
        self._bits[slot >> 3] |= 1 << (slot & 7)

    def missing(self, slots: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the positions in ``slots`` of the chunks that are not marked."""
        return np.flatnonzero(self._bits[slots >> 3] >> (slots & 7).astype(np.uint8) & 1 == 0)

    def slots(self) -> list[int]:
        """Return the indices of the marked chunks in ascending order."""
        found: list[int] = np.flatnonzero(np.unpackbits(self._bits, bitorder="little")).tolist()
        return found
