"""Lists a tar archive by its headers alone, so that members can be read in place, also those of inner archives.

The `tarfile` module stops without a word at a damaged or missing header, and keeps an object for every member. Here
each header's checksum must hold, an archive must end with its empty block, and nothing is kept. What an archive says
of itself is bounded: the digits of a number, the bytes and records of an extension header, how many of those precede
a member, and the length of a name.

Nor is a single header left to `TarInfo.frombuf`: it takes the times in a header of GNU tar for the beginning of the
name, accepts sizes such as -100 and 1_0, refuses a member whose owner is not a number, and takes four times as long
(18 against 5 µs a member).
Format: POSIX.1-1988 (ustar), POSIX.1-2001 (pax) and GNU long names.
"""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from preprocess.printable import printable
from preprocess.regular_file import IrregularFileError, open_regular
from preprocess.sources.listing import SourceError

BLOCK = 512

_FILE_TYPES = frozenset(b"0\x007")
_FOLDER_TYPE = ord("5")
_LONG_NAME, _PAX_MEMBER, _PAX_ALL = ord("L"), ord("x"), ord("g")
_MAX_EXTENSION_BYTES = 2**20
_MAX_EXTENSION_RECORDS = 1_000
_MAX_EXTENSIONS_IN_A_ROW = 16  # GNU tar and pax write three at most ahead of a member: g, L or x, K
_MAX_NAME_BYTES = 4096  # the longest path that Linux opens
_MAX_SIZE_DIGITS = 19  # of 2^63, the largest file
_SPARSE = "GNU.sparse."  # how all pax keywords of a file that GNU tar stored without its holes begin
_KINDS = {
    ord("1"): "a hard link",
    ord("2"): "a symbolic link",
    ord("3"): "a device",
    ord("4"): "a device",
    ord("6"): "a pipe",
    ord("K"): "a link",
    ord("S"): "stored with holes",
}


class TarBytes(Protocol):
    """An archive's bytes, wherever they are."""

    @property
    def path(self) -> Path:
        """Where the archive is, for errors."""

    @property
    def num_bytes(self) -> int:
        """Its length."""

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, or raise OSError."""


@dataclass(frozen=True)
class TarFile:
    """An open archive.

    Attributes:
        descriptor: of the file, which is only read with `pread`.
        path: of the file.
        num_bytes: its length when it was opened.
        modified_ns: when it had been written to for the last time before it was opened.
    """

    descriptor: int
    path: Path
    num_bytes: int
    modified_ns: int

    def check_unchanged(self) -> None:
        """Makes sure that offsets found earlier still mean the same.

        Raises:
            OSError: ESTALE, the archive has been written to since it was opened.
        """
        status = os.fstat(self.descriptor)
        if (status.st_size, status.st_mtime_ns) != (self.num_bytes, self.modified_ns):
            raise OSError(errno.ESTALE, f"{printable(self.path)} has changed since it was listed")

    def read(self, offset: int, size: int) -> bytes:
        """Returns `size` bytes from `offset`, from any thread.

        Raises:
            OSError: the archive cannot be read, or is shorter than that.
        """
        parts = []
        while size > 0:
            part = os.pread(self.descriptor, size, offset)
            if not part:
                raise OSError(f"{printable(self.path)} ends at byte {offset}, {size} bytes too early")
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(frozen=True, slots=True)
class Member:
    """A file in an archive: its name, and where its bytes lie in the outermost file."""

    name: str
    offset: int
    size: int


def open_tar(path: Path) -> TarFile:
    """Opens an archive for `members`; the caller closes the descriptor.

    Raises:
        SourceError: the file cannot be opened, or is none.
    """
    try:
        descriptor = open_regular(path)
    except IrregularFileError as error:
        raise SourceError(f"{printable(path)} is no file; give the folder or archive with the images") from error
    except OSError as error:
        raise SourceError(f"{printable(path)} cannot be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    return TarFile(descriptor, path, status.st_size, status.st_mtime_ns)


def is_tar(head: bytes) -> bool:
    """Whether a file that begins with these bytes (a block or more) is an uncompressed tar archive."""
    return len(head) >= BLOCK and _checksum_holds(head[:BLOCK])


def members(tar: TarBytes, start: int = 0, stop: int | None = None, inside: str = "") -> Iterator[Member]:
    """Yields the files of an archive, or of the inner archive that lies in its bytes `start` to `stop`.

    Args:
        tar: the open archive.
        start: where the archive to list begins, in bytes.
        stop: where it ends; the end of the file by default.
        inside: its name as a member, for errors.

    Raises:
        SourceError: the archive is truncated, damaged or beyond the bounds (with the offset), or has a member that
            could write or read outside a folder it is unpacked to (an absolute path, one with "..", a link or a
            device), or one whose bytes are not all there (GNU's sparse files).
    """
    stop = tar.num_bytes if stop is None else stop
    where = printable(f"{tar.path}!{inside}" if inside else str(tar.path))
    position = start
    num_extensions = 0
    extended: dict[str, str] = {}  # what extension headers say of the member that follows
    while any(block := _read_block(tar, position, stop, where)):
        kind, name, size = _header(block, extended, position, stop, where)
        data = position + BLOCK
        if kind in (_LONG_NAME, _PAX_MEMBER, _PAX_ALL):
            num_extensions += 1
            _check_extensions_in_a_row(num_extensions, position, where)
            if kind != _PAX_ALL:
                extended |= _extension(tar, kind, data, size, where)
        else:
            _refuse_unsafe(name, kind, where, position, sparse=_SPARSE in extended)
            extended, num_extensions = {}, 0
            if kind != _FOLDER_TYPE and not name.endswith("/"):  # before POSIX, a folder was a file with such a name
                yield Member("/".join(part for part in name.split("/") if part not in ("", ".")), data, size)
        position = data + -(-size // BLOCK) * BLOCK


def _header(block: bytes, extended: dict[str, str], position: int, stop: int, where: str) -> tuple[int, str, int]:
    """Return type, name and size in bytes of the member whose header is ``block``, at byte ``position``.

    Raises:
        SourceError: it is no header, or the archive, which ends at ``stop``, lacks some of the member's bytes.
    """
    if not _checksum_holds(block):
        raise SourceError(f"{where} is damaged: no tar header at byte {position}; fetch the archive again")
    size = _size(block, extended, where, position)
    name = extended.get("path") or _plain_name(block)
    missing = position + BLOCK + size - stop
    if missing > 0:
        raise SourceError(
            f"{where} is truncated: it ends at byte {stop}, within member {printable(name)}, which begins at byte "
            f"{position} and needs {missing} bytes more; fetch the archive again"
        )
    return block[156], name, size


def _check_extensions_in_a_row(num_extensions: int, position: int, where: str) -> None:
    if num_extensions > _MAX_EXTENSIONS_IN_A_ROW:
        raise SourceError(
            f"{where} is damaged: more than {_MAX_EXTENSIONS_IN_A_ROW} extension headers follow each other, "
            f"the last at byte {position}; fetch the archive again"
        )


def _read_block(tar: TarBytes, position: int, stop: int, where: str) -> bytes:
    if position + BLOCK > stop:
        raise SourceError(
            f"{where} is truncated: it ends at byte {stop} without the empty block that ends an archive; "
            "fetch the archive again"
        )
    return _read(tar, position, BLOCK, where)


def _read(tar: TarBytes, position: int, size: int, where: str) -> bytes:
    try:
        return tar.read(position, size)
    except OSError as error:
        raise SourceError(f"{where} cannot be read at byte {position}: {error.strerror or error}") from error


def _checksum_holds(block: bytes) -> bool:
    """The sum of all bytes, the checksum's own eight counted as spaces."""
    digits = block[148:156].strip(b"\0 ")
    return (
        digits.isdigit()
        and set(digits) <= set(b"01234567")
        and int(digits, 8) == sum(block) - sum(block[148:156]) + 256
    )


def _size(block: bytes, extended: dict[str, str], where: str, position: int) -> int:
    if said := extended.get("size"):  # an empty record takes an earlier one back
        if said.isascii() and said.isdecimal() and len(said) <= _MAX_SIZE_DIGITS:
            return int(said)
        found: str | bytes = said if len(said) <= 2 * _MAX_SIZE_DIGITS else f"{said[:_MAX_SIZE_DIGITS]}…"
    else:
        found = raw = block[124:136]
        # GNU: big-endian binary for sizes from 8 GiB; 0xff begins negative ones.
        if raw[0] == 0x80 and not any(raw[1:4]):
            return int.from_bytes(raw[4:])
        digits = raw.strip(b"\0 ")
        if set(digits) <= set(b"01234567"):
            return int(digits or b"0", 8)
    raise SourceError(
        f"{where} is damaged: the header at byte {position} has the size {found!r}; fetch the archive again"
    )


def _plain_name(block: bytes) -> str:
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0":  # GNU's own header ("ustar  ") keeps times where POSIX has the prefix
        prefix = block[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return name.decode("utf-8", "surrogateescape")


def _extension(tar: TarBytes, kind: int, data: int, size: int, where: str) -> dict[str, str]:
    """Returns what an extension header says of the next member: its path, in pax also its size and if it is sparse."""
    if size > _MAX_EXTENSION_BYTES:
        raise SourceError(f"{where} is damaged: an extension header of {size} bytes at byte {data}")
    content = _read(tar, data, size, where)
    if kind == _LONG_NAME:
        return {"path": content.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")}
    records: dict[str, str] = {}
    position = num_records = 0
    while position < len(content):
        num_records += 1
        digits = content[position : position + len(str(_MAX_EXTENSION_BYTES)) + 1].partition(b" ")[0]
        stop = position + (int(digits) if digits.isdigit() else 0)
        if num_records > _MAX_EXTENSION_RECORDS or not position + len(digits) < stop <= len(content):
            raise SourceError(f"{where} is damaged: the pax header at byte {data} has no valid record; fetch it again")
        key, _, value = content[position + len(digits) + 1 : stop - 1].partition(b"=")
        if key in (b"path", b"size"):
            records[key.decode()] = value.decode("utf-8", "surrogateescape")
        elif key.startswith(_SPARSE.encode()):
            records[_SPARSE] = ""
        position = stop
    return records


def _refuse_unsafe(name: str, kind: int, where: str, position: int, *, sparse: bool) -> None:
    num_bytes = len(name.encode("utf-8", "surrogateescape"))
    if num_bytes > _MAX_NAME_BYTES:
        raise SourceError(
            f"{where} is refused: the member at byte {position} has a name of {num_bytes:,} bytes, "
            f"{_MAX_NAME_BYTES:,} are allowed; write the archive again with shorter names"
        )
    shown = printable(name)
    if "\0" in name:
        raise SourceError(f"{where} is refused: its member {shown} at byte {position} has a NUL in its name")
    if sparse or (kind not in _FILE_TYPES and kind != _FOLDER_TYPE):
        what = "stored with holes" if sparse else _KINDS.get(kind, f"of type {chr(kind)!r}")
        raise SourceError(f"{where} is refused: its member {shown} is {what}, not a file")
    if name.startswith("/") or ".." in name.split("/"):
        raise SourceError(f"{where} is refused: its member {shown} has a path that leads out of the archive")
