"""Lists the members of tar archives, even nested ones, from their headers, so that members can be read in place.

The `tarfile` module stops silently at a damaged or missing header, and keeps an object for every member. Here, the
checksum of each header must be correct, an archive must end with an empty block, and no objects are kept. There are
limits on the digits of a number, the bytes and records of an extension header, the number of extension headers before a
member, and the length of a name.

`TarInfo.frombuf` is not used for single headers either: it mistakes the times in a GNU tar header for the beginning of
the name, accepts sizes such as -100 and 1_0, refuses a member whose owner is not a number, and takes almost four times
as long (18 instead of 5 µs per member).
Format: POSIX.1-1988 (ustar), POSIX.1-2001 (pax) and GNU long names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.sources.listing import SourceError
from loopfeed.preprocess.system_errors import reading_remedy

BLOCK = 512
_PIECE_BYTES = 1 << 20

_FILE_TYPES = frozenset(b"0\x007")
_FOLDER_TYPE = ord("5")
_LONG_NAME, _PAX_MEMBER, _PAX_ALL = ord("L"), ord("x"), ord("g")
_MAX_EXTENSION_BYTES = 2**20
_MAX_EXTENSION_RECORDS = 1_000
_MAX_EXTENSIONS_IN_A_ROW = 16  # GNU tar and pax write at most three before a member: g, L or x, K
_MAX_NAME_BYTES = 4096  # the longest path that Linux opens
_MAX_SIZE_DIGITS = 19  # 2^63, the size of the largest file, has 19 digits
_SPARSE = "GNU.sparse."  # the prefix of all pax keywords of a sparse file stored by GNU tar
_KINDS = {
    ord("1"): "a hard link",
    ord("2"): "a symbolic link",
    ord("3"): "a device",
    ord("4"): "a device",
    ord("6"): "a pipe",
    ord("K"): "a link",
    ord("S"): "a sparse file",
}


class TarBytes(Protocol):
    """An archive, in a file or in memory, that can be read at any offset."""

    @property
    def path(self) -> Path:
        """The path of the archive, for messages."""

    @property
    def num_bytes(self) -> int:
        """The length of the archive in bytes."""

    def read(self, offset: int, size: int) -> bytes:
        """Return the `size` bytes that start at `offset`, or raise OSError."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file in an archive: its name, its size in bytes, and where it is.

    In a tar archive, `offset` is that of its content in the outermost archive; in a zip archive, that of its entry in
    the directory at the end.
    """

    name: str
    offset: int
    size: int


def is_tar(head: bytes) -> bool:
    """Return whether a file that begins with the bytes `head` (at least one block) is an uncompressed tar archive."""
    return len(head) >= BLOCK and _checksum_holds(head[:BLOCK])


def members(tar: TarBytes, start: int = 0, stop: int | None = None, inside: str = "") -> Iterator[Member]:
    """Yield the files in an archive, or in the nested archive that occupies its bytes `start` to `stop`.

    Args:
        tar: the open archive.
        start: the offset of the archive to list, in bytes.
        stop: the offset of its end; the end of the file by default.
        inside: the name of the nested archive, for messages.

    Raises:
        SourceError: the archive is truncated, damaged or exceeds a limit (with the offset); or it has a member that
            could write or read outside the folder that it is unpacked to (an absolute path, one with "..", a link or
            a device), or a GNU sparse file, whose bytes are not all stored.
    """
    stop = tar.num_bytes if stop is None else stop
    where = printable(f"{tar.path}!{inside}" if inside else str(tar.path))
    position = start
    num_extensions = 0
    extended: dict[str, str] = {}  # from the extension headers of the next member
    while any(block := _read_block(tar, position, stop, where)):
        kind, name, size = _header(block, extended, position, stop, where)
        data = position + BLOCK
        if kind in (_LONG_NAME, _PAX_MEMBER, _PAX_ALL):
            num_extensions += 1
            if num_extensions > _MAX_EXTENSIONS_IN_A_ROW:
                raise SourceError(
                    f"{where} is damaged: it has more than {_MAX_EXTENSIONS_IN_A_ROW} extension headers in a row, "
                    f"the last at byte {position}; download the archive again"
                )
            if kind != _PAX_ALL:
                extended |= _extension(tar, kind, data, size, where)
        else:
            _refuse_unsafe(name, kind, where, position, sparse=_SPARSE in extended)
            extended, num_extensions = {}, 0
            if kind != _FOLDER_TYPE and not name.endswith("/"):  # before POSIX, such a name marked a folder
                yield Member("/".join(part for part in name.split("/") if part not in ("", ".")), data, size)
        position = data + -(-size // BLOCK) * BLOCK
    _refuse_members_after(position, tar, stop, where)


def _refuse_members_after(end: int, tar: TarBytes, stop: int, where: str) -> None:
    """Raise SourceError if a member follows the empty block at byte `end`, which every program takes for the end."""
    for start in range(end, stop, _PIECE_BYTES):
        piece = _read(tar, start, min(_PIECE_BYTES, stop - start), where)
        for at in range(0, len(piece), BLOCK) if piece.strip(b"\0") else ():
            if _checksum_holds(piece[at : at + BLOCK]):
                raise SourceError(
                    f"{where} has members after its end at byte {end}, from byte {start + at} on: it is damaged, or is "
                    "several archives in one file; download it again, or unpack it with tar --ignore-zeros -xf, and "
                    "give the folder"
                )


def _header(block: bytes, extended: dict[str, str], position: int, stop: int, where: str) -> tuple[int, str, int]:
    """Return the type, name and size in bytes of the member whose header ``block`` is at byte ``position``.

    Raises:
        SourceError: ``block`` is not a header, or the archive ends at ``stop``, before the end of the member.
    """
    if not _checksum_holds(block):
        raise SourceError(f"{where} is damaged: no tar header at byte {position}; download the archive again")
    size = _size(block, extended, where, position)
    name = extended.get("path") or _plain_name(block)
    missing = position + BLOCK + size - stop
    if missing > 0:
        raise SourceError(
            f"{where} is truncated: it ends at byte {stop}, within member {printable(name)}, which begins at byte "
            f"{position} and needs {missing} more bytes; download the archive again"
        )
    return block[156], name, size


def _read_block(tar: TarBytes, position: int, stop: int, where: str) -> bytes:
    if position + BLOCK > stop:
        raise SourceError(
            f"{where} is truncated: it ends at byte {stop} without the empty block that ends an archive; "
            "download the archive again"
        )
    return _read(tar, position, BLOCK, where)


def _read(tar: TarBytes, position: int, size: int, where: str) -> bytes:
    try:
        return tar.read(position, size)
    except OSError as error:
        raise SourceError(
            f"{where} cannot be read at byte {position}: {error.strerror or error}; "
            f"{reading_remedy(error, 'download it again')}"
        ) from error


def _checksum_holds(block: bytes) -> bool:
    """Return whether a header's checksum equals the sum of its bytes, with the checksum field counted as spaces."""
    digits = block[148:156].strip(b"\0 ")
    return (
        digits.isdigit()
        and set(digits) <= set(b"01234567")
        and int(digits, 8) == sum(block) - sum(block[148:156]) + 256
    )


def _size(block: bytes, extended: dict[str, str], where: str, position: int) -> int:
    if digits_found := extended.get("size"):  # an empty record cancels an earlier one
        if digits_found.isascii() and digits_found.isdecimal() and len(digits_found) <= _MAX_SIZE_DIGITS:
            return int(digits_found)
        is_short = len(digits_found) <= 2 * _MAX_SIZE_DIGITS
        found: str | bytes = digits_found if is_short else f"{digits_found[:_MAX_SIZE_DIGITS]}…"
    else:
        found = raw = block[124:136]
        # GNU: big-endian binary for sizes from 8 GiB; 0xff marks negative sizes.
        if raw[0] == 0x80 and not any(raw[1:4]):
            return int.from_bytes(raw[4:])
        digits = raw.strip(b"\0 ")
        if set(digits) <= set(b"01234567"):
            return int(digits or b"0", 8)
    raise SourceError(
        f"{where} is damaged: the header at byte {position} has the size {found!r}, which is not valid; "
        "download the archive again"
    )


def _plain_name(block: bytes) -> str:
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0":  # the GNU header ("ustar  ") has times in place of the POSIX prefix
        prefix = block[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return name.decode("utf-8", "surrogateescape")


def _extension(tar: TarBytes, kind: int, data: int, size: int, where: str) -> dict[str, str]:
    """Return the fields that an extension header sets for the next member.

    These are the path and, in pax headers, the size and whether the member is a sparse file.
    """
    if size > _MAX_EXTENSION_BYTES:
        raise SourceError(
            f"{where} is damaged: the extension header at byte {data} has {size} bytes, more than the "
            f"{_MAX_EXTENSION_BYTES} allowed; download the archive again"
        )
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
            raise SourceError(
                f"{where} is damaged: the pax header at byte {data} has an invalid record, or more than "
                f"{_MAX_EXTENSION_RECORDS} records; download the archive again"
            )
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
            f"{where} is refused: the member at byte {position} has a name of {num_bytes:,} bytes, more "
            f"than the {_MAX_NAME_BYTES:,} allowed; write the archive again with shorter names"
        )
    shown = printable(name)
    if "\0" in name:
        raise SourceError(
            f"{where} is refused: its member {shown} at byte {position} has a NUL character in its name; "
            "write the archive again without it"
        )
    if sparse or (kind not in _FILE_TYPES and kind != _FOLDER_TYPE):
        what = "a sparse file" if sparse else _KINDS.get(kind, f"of type {chr(kind)!r}")
        raise SourceError(
            f"{where} is refused: its member {shown} is {what}, not a regular file; write the archive again without it"
        )
    if name.startswith("/") or ".." in name.split("/"):
        raise SourceError(
            f"{where} is refused: its member {shown} has a path that leads out of the archive; "
            "write the archive again with relative paths"
        )
