"""Lists the members of zip archives from the directory at their end, and reads members in place.

The `zipfile` module keeps an object for every member and a lock around every read. Here, only the offset of a member's
entry in the directory is kept, and any thread reads. Sizes are those that the archive declares: a member that unpacks
to more is refused after the first byte too many, and its CRC-32 must be correct.
Format: PKWARE's APPNOTE.TXT 6.3.10, with zip64.
"""

import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.sources.listing import SourceError
from loopfeed.preprocess.sources.source_file import SourceFile
from loopfeed.preprocess.sources.tarindex import Member
from loopfeed.preprocess.system_errors import reading_remedy

BEGINNINGS = (b"PK\x03\x04", b"PK\x05\x06")
"""How a zip archive begins: with a member, or with the end of an empty archive."""

_ENTRY, _LOCAL = struct.Struct("<4s4B4HL2L5H2L"), struct.Struct("<4s5H3L2H")
_END, _END64_PLACE, _END64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")
_MAX_COMMENT_BYTES = 65_535
_PIECE_BYTES = 1 << 20
_IN_ZIP64_16, _IN_ZIP64 = 0xFFFF, 0xFFFF_FFFF
_STORED, _DEFLATED = 0, 8
_METHODS = {9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "Zstandard", 95: "XZ", 99: "AES encryption"}
_ENCRYPTED, _IS_UTF8 = 1 << 0 | 1 << 6 | 1 << 13, 1 << 11
_UNIX, _MACOS = 3, 19
_WINDOWS = (0, 10, 11, 14)  # FAT, NTFS, MVS's neighbour of them, VFAT
_ZIP64_EXTRA = 1
_AGAIN = "download the archive again"
_REPACK = "write the archive again"


class _Entry(NamedTuple):
    """What the directory says of a member: its raw name, and where and how its content is stored."""

    raw_name: bytes
    host: int
    flags: int
    method: int
    crc: int
    num_stored: int
    size: int
    mode: int
    local: int
    num_bytes: int


def zip_members(file: SourceFile) -> Iterator[Member]:
    """Yield the files in a zip archive; the offset of each is that of its entry in the directory.

    Raises:
        SourceError: the archive is truncated or damaged, or it has a member that is encrypted, compressed by another
            method than Deflate, a link, or has a path that leads out of the archive.
    """
    where = printable(file.path)
    position, stop, count = _directory(file, where)
    found, buffer, start = 0, b"", position
    while position < stop:
        if position - start + _ENTRY.size + 3 * _IN_ZIP64_16 > len(buffer) and start + len(buffer) < stop:
            start, buffer = position, _read(file, position, min(_PIECE_BYTES, stop - position), where)
        entry = _entry(buffer, position - start, where, position)
        name = _name(entry)
        if not name.endswith("/"):
            _refuse(name, entry, where)
            yield Member("/".join(part for part in name.split("/") if part not in ("", ".")), position, entry.size)
        position, found = position + entry.num_bytes, found + 1
    if position != stop or found != count:
        raise SourceError(f"{where} is damaged: its directory has {found} members instead of {count}; {_AGAIN}")


def read_zip_member(file: SourceFile, offset: int, size: int) -> bytes:
    """Return the content of a member, whose entry in the directory is at `offset`, after checking its CRC-32.

    Raises:
        OSError: the archive cannot be read.
        SourceError: the member is damaged, or unpacks to another number of bytes than `size`.
    """
    entry, start = _locate(file, offset)
    stored = file.read(start, entry.num_stored)
    if entry.method == _STORED:
        content, is_whole = stored, True
    else:
        unpacker = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
        try:
            content = unpacker.decompress(stored, size + 1)
        except zlib.error as error:
            raise SourceError(f"its compressed data in the zip archive are damaged: {error}; {_AGAIN}") from error
        is_whole = unpacker.eof or len(content) > size
    if len(content) != size or not is_whole:
        more = "more than" if len(content) > size else f"{len(content)} instead of"
        raise SourceError(f"it unpacks to {more} the {size} bytes that the zip archive declares; {_AGAIN}")
    if zlib.crc32(content) != entry.crc:
        raise SourceError(f"its CRC-32 differs from the one in the zip archive, so it is damaged; {_AGAIN}")
    return content


def stored_range(file: SourceFile, offset: int) -> tuple[int, int, bool]:
    """Return where the data of a member are, how many bytes they are, and whether they are compressed.

    Raises:
        SourceError: the archive cannot be read or is damaged there.
    """
    try:
        entry, start = _locate(file, offset)
    except OSError as error:
        raise _unreadable(printable(file.path), offset, error) from error
    return start, entry.num_stored, entry.method != _STORED


def _locate(file: SourceFile, offset: int) -> tuple[_Entry, int]:
    """Return the entry of a member at `offset` in the directory, and the offset of its data."""
    where = printable(file.path)
    longest = min(_ENTRY.size + 3 * _IN_ZIP64_16, file.num_bytes - offset)
    try:
        entry = _entry(file.read(offset, min(1024, longest)), 0, where, offset)
    except SourceError:
        entry = _entry(file.read(offset, longest), 0, where, offset)
    damaged = SourceError(
        f"{where} is damaged: it has no member at byte {entry.local}, where its directory says so; {_AGAIN}"
    )
    if entry.local + _LOCAL.size + len(entry.raw_name) > file.num_bytes:
        raise damaged
    head = file.read(entry.local, _LOCAL.size + len(entry.raw_name))
    signature, *_, num_name, num_extra = _LOCAL.unpack_from(head)
    start = entry.local + _LOCAL.size + num_name + num_extra
    if signature != b"PK\x03\x04" or num_name != len(entry.raw_name) or head[_LOCAL.size :] != entry.raw_name:
        raise damaged
    if start + entry.num_stored > file.num_bytes:
        raise SourceError(f"{where} is damaged: the member at byte {entry.local} goes beyond its end; {_AGAIN}")
    return entry, start


def _directory(file: SourceFile, where: str) -> tuple[int, int, int]:
    """Return where the directory starts and stops, and how many members it has."""
    start = max(0, file.num_bytes - _END.size - _MAX_COMMENT_BYTES)
    tail = _read(file, start, file.num_bytes - start, where)
    at = len(tail)
    while (at := tail.rfind(b"PK\x05\x06", 0, at)) >= 0:
        if at + _END.size <= len(tail) and at + _END.size + _END.unpack_from(tail, at)[-1] == len(tail):
            break
    else:
        raise SourceError(f"{where} is truncated: it ends without the directory that ends a zip archive; {_AGAIN}")
    _, disk, _, _, count, num_bytes, first, _ = _END.unpack_from(tail, at)
    stop = start + at
    if _IN_ZIP64_16 in (disk, count) or _IN_ZIP64 in (num_bytes, first):
        place = stop - _END64_PLACE.size
        signature, _, place64, _ = _END64_PLACE.unpack(_read(file, place, _END64_PLACE.size, where))
        if signature == b"PK\x06\x07":
            signature, *_, disk, _, _, count, num_bytes, first = _END64.unpack(_read(file, place64, _END64.size, where))
            stop = place64 if signature == b"PK\x06\x06" else -1
    if disk != 0:
        raise SourceError(f"{where} is one of several volumes of a zip archive; join them, such as with zip -s 0")
    if first + num_bytes != stop:
        raise SourceError(
            f"{where} is damaged: its directory of {num_bytes} bytes at byte {first} does not end at byte {stop}; "
            f"{_AGAIN}"
        )
    return first, stop, count


def _entry(buffer: bytes, at: int, where: str, position: int) -> _Entry:
    try:
        signature, _, host, _, _, flags, method, _, _, crc, num_stored, size, *rest = _ENTRY.unpack_from(buffer, at)
        num_name, num_extra, num_comment, _, _, mode, local = rest
        names = at + _ENTRY.size
        extra = buffer[names + num_name : names + num_name + num_extra]
        if signature != b"PK\x01\x02" or names + num_name + num_extra > len(buffer):
            raise ValueError(f"signature {signature!r}")
        if _IN_ZIP64 in (size, num_stored, local):
            size, num_stored, local = _from_zip64(extra, size, num_stored, local)
    except (struct.error, ValueError) as error:
        raise SourceError(f"{where} is damaged: the entry at byte {position} of its directory is not valid") from error
    num_bytes = _ENTRY.size + num_name + num_extra + num_comment
    raw = buffer[names : names + num_name]
    return _Entry(raw, host, flags, method, crc, num_stored, size, mode >> 16, local, num_bytes)


def _from_zip64(extra: bytes, *values: int) -> list[int]:
    """Replace those values that do not fit in 32 bits with those of the extra field of zip64, in their order."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == _ZIP64_EXTRA:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            found = [next(wide, -1) if each == _IN_ZIP64 else each for each in values]
            if -1 in found or max(found) >= 2**63:
                break
            return found
        at += 4 + length
    raise ValueError("no extra field of zip64")


def _name(entry: _Entry) -> str:
    """Return the name of a member, with slashes.

    Programs that do not set the flag for UTF-8 may write it nevertheless; anything else is code page 437. On Windows,
    some programs write backslashes.
    """
    try:
        name = entry.raw_name.decode("utf-8")
    except UnicodeDecodeError:
        name = (
            entry.raw_name.decode("utf-8", "surrogateescape")
            if entry.flags & _IS_UTF8
            else entry.raw_name.decode("cp437")
        )
    return name.replace("\\", "/") if entry.host in _WINDOWS else name


def _refuse(name: str, entry: _Entry, where: str) -> None:
    shown = printable(name)
    if "\0" in name:
        raise SourceError(f"{where} is refused: its member {shown} has a NUL character in its name; {_REPACK}")
    if name.startswith("/") or ".." in name.replace("\\", "/").split("/") or name[1:3] in (":/", ":\\"):
        raise SourceError(
            f"{where} is refused: its member {shown} has a path that leads out of the archive; "
            f"{_REPACK} with relative paths"
        )
    if entry.host in (_UNIX, _MACOS) and stat.S_IFMT(entry.mode) not in (0, stat.S_IFREG):
        what = "a symbolic link" if stat.S_ISLNK(entry.mode) else "a special file"
        raise SourceError(f"{where} is refused: its member {shown} is {what}, not a regular file; {_REPACK} without it")
    if entry.flags & _ENCRYPTED:
        raise SourceError(f"{where} is encrypted (its member {shown}); unpack it with its password and give the folder")
    if entry.method not in (_STORED, _DEFLATED):
        method = _METHODS.get(entry.method, f"method {entry.method}")
        raise SourceError(
            f"{where} has the member {shown} compressed with {method}, which is not read; {_REPACK} with Deflate, or "
            "unpack it and give the folder"
        )
    if entry.method == _STORED and entry.num_stored != entry.size:
        raise SourceError(
            f"{where} is damaged: its member {shown} is stored in {entry.num_stored} bytes but declares {entry.size}; "
            f"{_AGAIN}"
        )


def _read(file: SourceFile, offset: int, size: int, where: str) -> bytes:
    try:
        if offset < 0:
            raise OSError("it is too short")
        return file.read(offset, size)
    except OSError as error:
        raise _unreadable(where, offset, error) from error


def _unreadable(where: str, offset: int, error: OSError) -> SourceError:
    return SourceError(
        f"{where} cannot be read at byte {offset}: {error.strerror or error}; "
        f"{reading_remedy(error, 'download it again')}"
    )


def member_pieces(file: SourceFile, offset: int, size: int, where: str) -> Iterator[bytes]:
    """Yield the content of a member in pieces, and check their number and CRC-32.

    Args:
        file: the archive.
        offset: the offset of the member's entry in the directory.
        size: how many bytes the member declares.
        where: the member, for messages.

    Raises:
        SourceError: the archive cannot be read, or the member is damaged.
    """
    try:
        entry, start = _locate(file, offset)
    except OSError as error:
        raise _unreadable(where, offset, error) from error
    stop = start + entry.num_stored
    pieces = (_read(file, at, min(_PIECE_BYTES, stop - at), where) for at in range(start, stop, _PIECE_BYTES))
    crc = found = 0
    try:
        for content in pieces if entry.method == _STORED else _inflated(pieces):
            crc, found = zlib.crc32(content, crc), found + len(content)
            if found > size:
                raise SourceError(f"{where} unpacks to more than the {size} bytes that it declares; {_AGAIN}")
            yield content
    except zlib.error as error:
        raise SourceError(f"{where} is damaged: {error}; {_AGAIN}") from error
    if found != size or crc != entry.crc:
        raise SourceError(f"{where} is damaged: its length or CRC-32 differs from the one in the archive; {_AGAIN}")


def _inflated(pieces: Iterable[bytes]) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    for packed in pieces:
        yield unpacker.decompress(packed, _PIECE_BYTES)
        while unpacker.unconsumed_tail:
            yield unpacker.decompress(unpacker.unconsumed_tail, _PIECE_BYTES)
    while not unpacker.eof and (rest := unpacker.decompress(b"", _PIECE_BYTES)):
        yield rest
