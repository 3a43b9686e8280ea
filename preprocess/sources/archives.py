"""Opens tar and zip archives, which are read in place behind one small interface.

Owns which files are such archives. Must not know: what their members mean.
"""

import stat
import struct
import threading
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import compress, tee
from pathlib import Path
from typing import IO, Protocol

from loopfeed.preprocess.file_kinds import UNPACK, kind_of
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.sources.listing import ByteStore, SourceError
from loopfeed.preprocess.sources.source_file import SourceFile, StoredImages, open_source_file
from loopfeed.preprocess.sources.tarindex import BLOCK, Member, is_tar, members
from loopfeed.preprocess.system_entries import visible
from loopfeed.preprocess.system_errors import reading_remedy

ZIP_BEGINNINGS = _MEMBER, _NO_MEMBER = b"PK\x03\x04", b"PK\x05\x06"
"""How a zip archive begins: with a member, or with the end of an empty archive."""

_DAMAGES = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, OverflowError),
    *(NotImplementedError, RuntimeError),
)
_WITHOUT_DIRECTORY = "File is not a zip file"
_SHOWN_CHARACTERS = 160
_NAME_LENGTH_AT, _LOCAL_HEADER_BYTES = 26, 30
_IS_UTF8, _ENCRYPTED = 1 << 11, 1 << 0 | 1 << 6 | 1 << 13
_METHODS = {9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "Zstandard", 95: "XZ", 99: "AES encryption"}
_WINDOWS, _UNIX = (0, 10, 11, 14), (3, 19)  # FAT, NTFS, MVS's neighbour of them, VFAT; Unix, macOS
_AGAIN, _REPACK = "download the archive again", "write the archive again"


class Archive(ByteStore, Protocol):
    """An open archive: the store of the images in it."""

    @property
    def kind(self) -> str:
        """What it is, for messages: "tar archive"."""

    @property
    def file(self) -> SourceFile:
        """The file that it is in."""

    def members(self) -> Iterator[Member]:
        """Yield its files; raise SourceError if it is damaged or unsafe."""


class TarArchive(StoredImages):
    """An open tar archive, whose members are read by their offsets."""

    kind = "tar archive"

    def members(self) -> Iterator[Member]:
        """Yield its files; raise SourceError if it is damaged or unsafe."""
        return members(self.file)


class ZipArchive:
    """An open zip archive. The offset of a member is its number in the directory at the end of the archive.

    A member that does not unpack to the size and the CRC-32 that the archive declares is refused.
    """

    kind = "zip archive"

    def __init__(self, file: SourceFile) -> None:
        self.file, self._where, self._lock = file, printable(file.path), threading.Lock()
        try:
            self._zip = zipfile.ZipFile(open(file.descriptor, "rb", closefd=False))  # noqa: SIM115 - `file` is closed
            self._entries = self._zip.infolist()
        except OSError as error:
            raise _unreadable(self._where, error) from error
        except _DAMAGES as error:
            if str(error) == _WITHOUT_DIRECTORY:
                raise SourceError(
                    f"{self._where} is truncated: it ends without the directory that ends a zip archive; {_AGAIN}"
                ) from error
            raise SourceError(f"{self._where} is damaged: {error}; {_AGAIN}") from error

    def members(self) -> Iterator[Member]:
        """Yield its files; raise SourceError if it is damaged, unsafe, encrypted or compressed by another method."""
        # `ZipFile` takes bytes before an archive for a program that unpacks it, and those that are missing likewise.
        first = min((entry.header_offset for entry in self._entries), default=0)
        is_within = 0 <= first <= self.file.num_bytes - len(_MEMBER)
        if not is_within or self._at(first) not in (_MEMBER, _NO_MEMBER):
            raise SourceError(f"{self._where} is damaged: its directory does not fit its members; {_AGAIN}")
        for number, entry in enumerate(self._entries):
            name = _name_of(entry)
            if not name.endswith("/"):
                _refuse_entry(name, entry, self._where)
                plain = "/".join(part for part in name.split("/") if part not in ("", "."))
                yield Member(plain, number, entry.file_size)

    def read(self, name: str, offset: int, size: int) -> bytes:  # noqa: ARG002 - its number is sufficient
        """Return the content of member `offset`, of `size` bytes.

        Raises:
            OSError: the archive cannot be read, or was written to after it was opened.
            SourceError: the member is damaged.
        """
        self.file.check_unchanged()
        with self.stream(offset) as stream:
            content = stream.read(size + 1)
        self.file.check_unchanged()
        if len(content) != size:
            raise SourceError(f"it unpacks to {len(content)} instead of the {size} bytes that the archive declares")
        return content

    @contextmanager
    def stream(self, offset: int) -> Iterator[IO[bytes]]:
        """Open member `offset` for reading from its first byte; its CRC-32 is checked at its end.

        Raises:
            OSError: the archive cannot be read.
            SourceError: the member is damaged.
        """
        try:
            with self._lock:  # `ZipFile` counts its open members
                stream = self._zip.open(self._entries[offset])
            try:
                yield stream
            finally:
                with self._lock:
                    stream.close()
        except _DAMAGES as error:
            fault = str(error)[:_SHOWN_CHARACTERS] or "truncated"  # it may have a name of any length
            raise SourceError(f"it is damaged in the zip archive: {fault}; {_AGAIN}") from error

    def stored_at(self, offset: int) -> int | None:
        """Return where in the file the bytes of member `offset` are; None if they are compressed."""
        entry = self._entries[offset]
        if entry.compress_type != zipfile.ZIP_STORED:
            return None
        with self.stream(offset):  # checks that the member is there
            lengths = self.file.read(entry.header_offset + _NAME_LENGTH_AT, 4)
        start = entry.header_offset + _LOCAL_HEADER_BYTES + sum(struct.unpack("<2H", lengths))
        if start + entry.file_size > self.file.num_bytes:
            raise SourceError(f"it goes beyond the end of the zip archive; {_AGAIN}")
        return start

    def _at(self, offset: int) -> bytes:
        try:
            return self.file.read(offset, len(_MEMBER))
        except OSError as error:
            raise _unreadable(self._where, error) from error

    def close(self) -> None:
        """Close the archive."""
        self.file.close()


def open_archive(path: Path) -> Archive:
    """Open a tar or zip archive. The caller must close it.

    Raises:
        SourceError: the file cannot be opened, or is neither.
    """
    file = open_source_file(path)
    try:
        head = file.head(BLOCK)
        if is_tar(head):
            return TarArchive(file)
        if head.startswith(ZIP_BEGINNINGS):
            return ZipArchive(file)
        raise _no_archive(path, head)
    except BaseException:
        file.close()
        raise


@contextmanager
def kept_open(path: Path) -> Iterator[Archive]:
    """Open an archive for listing. It stays open unless the body of the `with` statement raises an exception."""
    archive = open_archive(path)
    try:
        yield archive
    except BaseException:
        archive.close()
        raise


def visible_members(archive: Archive, ignored: Counter[str] | None = None) -> Iterator[Member]:
    """Yield the files in an archive whose paths have no hidden part; count the others in `ignored`.

    Raises:
        SourceError: as `Archive.members`.
    """
    return without_hidden(archive.members(), Counter() if ignored is None else ignored)


def without_hidden(found: Iterable[Member], ignored: Counter[str]) -> Iterator[Member]:
    """Yield the members whose paths have no hidden part; count the others in `ignored`."""
    listed, named = tee(found)
    return compress(listed, visible((member.name for member in named), ignored))


def _no_archive(path: Path, head: bytes) -> SourceError:
    kind, given = kind_of(head), "give the folder or archive that contains the images"
    if not head:
        return SourceError(f"{printable(path)} is an empty file; download it again")
    if kind is None:
        return SourceError(f"{printable(path)} is neither a folder nor a tar or zip archive; {given}")
    if kind.remedy == UNPACK:
        return SourceError(
            f"{printable(path)} is {kind.name}, so its images cannot be read in place; unpack it and give the folder"
        )
    remedy = kind.remedy if kind.is_lost else given
    return SourceError(f"{printable(path)} is {kind.name}, neither a folder nor a tar or zip archive; {remedy}")


def _name_of(entry: zipfile.ZipInfo) -> str:
    """Return the name of a member, with slashes.

    Programs that do not set the flag for UTF-8 may write it nevertheless; anything else is code page 437. On Windows,
    some programs write backslashes.
    """
    name = entry.orig_filename
    if entry.filename != name and "\0" not in name:
        name = entry.filename  # of an extra field for Unicode
    elif not entry.flag_bits & _IS_UTF8:
        with suppress(UnicodeDecodeError):
            name = name.encode("cp437").decode("utf-8")
    return name.replace("\\", "/") if entry.create_system in _WINDOWS else name


def _refuse_entry(name: str, entry: zipfile.ZipInfo, where: str) -> None:
    shown = printable(name[:_SHOWN_CHARACTERS])
    if entry.volume:
        raise SourceError(f"{where} is one of several volumes of a zip archive; join them, such as with zip -s 0")
    if "\0" in name:
        raise SourceError(f"{where} is refused: its member {shown} has a NUL character in its name; {_REPACK}")
    if name.startswith("/") or ".." in name.replace("\\", "/").split("/") or name[1:3] in (":/", ":\\"):
        raise SourceError(
            f"{where} is refused: its member {shown} has a path that leads out of the archive; "
            f"{_REPACK} with relative paths"
        )
    mode = entry.external_attr >> 16
    if entry.create_system in _UNIX and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "a special file"
        raise SourceError(f"{where} is refused: its member {shown} is {what}, not a regular file; {_REPACK} without it")
    if entry.flag_bits & _ENCRYPTED:
        raise SourceError(f"{where} is encrypted (its member {shown}); unpack it with its password and give the folder")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        method = _METHODS.get(entry.compress_type, f"method {entry.compress_type}")
        raise SourceError(
            f"{where} has the member {shown} compressed with {method}, which is not read; {_REPACK} with Deflate, or "
            "unpack it and give the folder"
        )
    if entry.compress_type == zipfile.ZIP_STORED and entry.compress_size != entry.file_size:
        raise SourceError(
            f"{where} is damaged: its member {shown} is stored in {entry.compress_size} bytes but declares "
            f"{entry.file_size}; {_AGAIN}"
        )


def _unreadable(where: str, error: OSError) -> SourceError:
    remedy = reading_remedy(error, "download it again")
    return SourceError(f"{where} cannot be read: {error.strerror or error}; {remedy}")
