"""Opens tar and zip archives, which are read in place behind one small interface.

Owns which files are such archives. Must not know: what their members mean.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, tee
from pathlib import Path
from typing import Protocol

from loopfeed.preprocess.file_kinds import UNPACK, kind_of
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.sources.listing import ByteStore, SourceError
from loopfeed.preprocess.sources.source_file import SourceFile, open_source_file
from loopfeed.preprocess.sources.tarindex import BLOCK, Member, is_tar, members
from loopfeed.preprocess.sources.zipindex import BEGINNINGS, read_zip_member, zip_members
from loopfeed.preprocess.system_entries import visible


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


@dataclass(frozen=True)
class TarArchive:
    """An open tar archive, whose members are read by their offsets."""

    file: SourceFile
    kind: str = "tar archive"

    def members(self) -> Iterator[Member]:
        """Yield its files; raise SourceError if it is damaged or unsafe."""
        return members(self.file)

    def read(self, name: str, offset: int, size: int) -> bytes:  # noqa: ARG002 - the offset is sufficient
        """Return the `size` bytes at `offset`.

        Raises:
            OSError: the archive cannot be read, or was written to after it was opened.
        """
        self.file.check_unchanged()
        return self.file.read(offset, size)

    def close(self) -> None:
        """Close the archive."""
        self.file.close()


@dataclass(frozen=True)
class ZipArchive:
    """An open zip archive, whose members are read by the offsets of their entries in its directory."""

    file: SourceFile
    kind: str = "zip archive"

    def members(self) -> Iterator[Member]:
        """Yield its files; raise SourceError if it is damaged, unsafe or encrypted."""
        return zip_members(self.file)

    def read(self, name: str, offset: int, size: int) -> bytes:  # noqa: ARG002 - the offset is sufficient
        """Return the content of the member whose entry is at `offset`, and which unpacks to `size` bytes.

        Raises:
            OSError: the archive cannot be read, or was written to after it was opened.
            SourceError: the member is damaged.
        """
        self.file.check_unchanged()
        return read_zip_member(self.file, offset, size)

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
        if head.startswith(BEGINNINGS):
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


@contextmanager
def opened(path: Path) -> Iterator[Archive]:
    """Open an archive, and close it at the end of the `with` statement."""
    archive = open_archive(path)
    try:
        yield archive
    finally:
        archive.close()


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
