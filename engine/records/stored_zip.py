"""A reader of zip archives whose entries are stored without compression, as PyTorch writes them.

Does not trust the file: the directory is bounded, every entry must lie within the file, and entries that would become
larger than the bytes that they take in the file, such as those that overlap, are refused: all entries together have at
most as many bytes as the file. Must not know what the entries contain.
"""

import struct
import zlib
from collections.abc import Mapping
from itertools import pairwise
from typing import BinaryIO, NamedTuple

from loopfeed.preprocess.printable import printable

MAX_ENTRIES = 100_000
_MAX_DIRECTORY_BYTES = 1 << 26
# PKWARE's APPNOTE.TXT, 4.3.7 to 4.3.16: the records of a zip file, after their four bytes of signature.
_END, _END_SIGNATURE = struct.Struct("<4x4H2LH"), b"PK\x05\x06"
_END64, _END64_SIGNATURE = struct.Struct("<4xQ2H2L4Q"), b"PK\x06\x06"
_LOCATOR64, _LOCATOR64_SIGNATURE = struct.Struct("<4xLQL"), b"PK\x06\x07"
_LISTED, _LISTED_SIGNATURE = struct.Struct("<4x6H3L5H2L"), b"PK\x01\x02"
_LOCAL, _LOCAL_SIGNATURE = struct.Struct("<4x5H3L2H"), b"PK\x03\x04"
_MAX_COMMENT_BYTES = 0xFFFF
_IN_ZIP64 = 0xFFFFFFFF
_IS_ENCRYPTED = 1


class ZipError(ValueError):
    """Raised if a file is not an archive that this module reads; the message says why, but does not name the file."""


class StoredEntry(NamedTuple):
    """The place of an entry in the file: offset of its local header, size of its content in bytes, and CRC-32."""

    header_offset: int
    num_bytes: int
    crc32: int


class StoredZip:
    """The entries of an archive by name. The caller opens and closes the file."""

    def __init__(self, file: BinaryIO) -> None:
        """Read the directory of the archive.

        Raises:
            ZipError: if there is none, it is damaged, has too many entries, or an entry is compressed or encrypted, or
                overlaps with another.
            OSError: if the file cannot be read.
        """
        self._file = file
        self.num_bytes = file.seek(0, 2)
        self.entries = _list_entries(self._read_directory(), self.num_bytes)

    def read(self, name: str) -> bytes:
        """Return the content of an entry.

        Raises:
            ZipError: if there is no such entry, it is not complete, or its CRC-32 differs.
            OSError: if the file cannot be read.
        """
        if name not in self.entries:
            raise ZipError(f"it has no entry {printable(name)}")
        entry = self.entries[name]
        header = self._read_at(entry.header_offset, _LOCAL.size)
        if not header.startswith(_LOCAL_SIGNATURE):
            raise ZipError(f"its entry {printable(name)} is damaged")
        *_, name_bytes, extra_bytes = _LOCAL.unpack(header)
        content = self._read_at(entry.header_offset + _LOCAL.size + name_bytes + extra_bytes, entry.num_bytes)
        if zlib.crc32(content) != entry.crc32:
            raise ZipError(f"its entry {printable(name)} is damaged: the CRC-32 differs")
        return content

    def _read_at(self, offset: int, num_bytes: int) -> bytes:
        if offset + num_bytes > self.num_bytes:
            raise ZipError("it is truncated")
        self._file.seek(offset)
        content = self._file.read(num_bytes)
        if len(content) != num_bytes:
            raise ZipError("it is truncated")
        return content

    def _read_directory(self) -> bytes:
        tail_bytes = min(self.num_bytes, _MAX_COMMENT_BYTES + _END.size + _LOCATOR64.size)
        tail = self._read_at(self.num_bytes - tail_bytes, tail_bytes)
        place = tail.rfind(_END_SIGNATURE, 0, max(0, tail_bytes - _END.size + len(_END_SIGNATURE)))
        if place < 0:
            raise ZipError("it is truncated, or not a zip file")
        _, _, _, num_entries, num_bytes, offset, _ = _END.unpack_from(tail, place)
        if tail[max(0, place - _LOCATOR64.size) : place].startswith(_LOCATOR64_SIGNATURE):
            _, end64_offset, _ = _LOCATOR64.unpack_from(tail, place - _LOCATOR64.size)
            end64 = self._read_at(end64_offset, _END64.size)
            if not end64.startswith(_END64_SIGNATURE):
                raise ZipError("its directory is damaged")
            *_, num_entries, num_bytes, offset = _END64.unpack(end64)
        if num_entries > MAX_ENTRIES or num_bytes > _MAX_DIRECTORY_BYTES:
            raise ZipError(
                f"it lists {num_entries:,} entries in {num_bytes:,} bytes, of at most {MAX_ENTRIES:,} in 64 MiB"
            )
        return self._read_at(offset, num_bytes)


def _list_entries(directory: bytes, file_bytes: int) -> dict[str, StoredEntry]:
    """Return the entries of a zip file's directory."""
    entries: dict[str, StoredEntry] = {}
    place = 0
    while place < len(directory):
        if len(entries) == MAX_ENTRIES:
            raise ZipError(f"it has more than {MAX_ENTRIES:,} entries")
        if not directory.startswith(_LISTED_SIGNATURE, place) or place + _LISTED.size > len(directory):
            raise ZipError("its directory is damaged")
        fields = _LISTED.unpack_from(directory, place)
        flags, method, crc32, packed, size = fields[2], fields[3], *fields[6:9]
        name_bytes, extra_bytes, comment_bytes, offset = *fields[9:12], fields[15]
        start = place + _LISTED.size
        place = start + name_bytes + extra_bytes + comment_bytes
        name = directory[start : start + name_bytes].decode("utf-8", "replace")
        extra = directory[start + name_bytes : start + name_bytes + extra_bytes]
        size, packed, offset = _wide_sizes(extra, (size, packed, offset))
        if method or flags & _IS_ENCRYPTED or packed != size:
            raise ZipError(f"its entry {printable(name)} is compressed or encrypted, which PyTorch's files are not")
        if place > len(directory) or offset + size > file_bytes or name in entries:
            raise ZipError(f"its entry {printable(name)} is listed twice, or lies outside the file")
        entries[name] = StoredEntry(offset, size, crc32)
    _check_overlap(entries)
    return entries


def _check_overlap(entries: Mapping[str, StoredEntry]) -> None:
    """Raise ZipError if two entries share bytes of the file."""
    ordered = sorted(entries.items(), key=lambda item: item[1].header_offset)
    for (name, entry), (next_name, following) in pairwise(ordered):
        # A local header also has a name and an extra field, whose lengths are in it; the bound holds without them.
        if entry.header_offset + _LOCAL.size + entry.num_bytes > following.header_offset:
            raise ZipError(f"its entries {printable(name)} and {printable(next_name)} overlap")


def _wide_sizes(extra: bytes, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the sizes and the offset of an entry, those that need more than 32 bits from its zip64 extra field."""
    if _IN_ZIP64 not in sizes:
        return sizes
    place = 0
    while place + 4 <= len(extra):
        kind, num_bytes = struct.unpack_from("<2H", extra, place)
        if kind == 1:
            num_wide = sizes.count(_IN_ZIP64)
            if num_bytes < 8 * num_wide or place + 4 + num_bytes > len(extra):
                break
            wide = iter(struct.unpack_from(f"<{num_wide}Q", extra, place + 4))
            size, packed, offset = (next(wide) if each == _IN_ZIP64 else each for each in sizes)
            return size, packed, offset
        place += 4 + num_bytes
    raise ZipError("its directory is damaged")
