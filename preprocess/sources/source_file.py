"""An open file of a source, read at any offset by any thread, and checked for changes since it was opened.

Owns how such a file is opened. Must not know: formats.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from loopfeed.preprocess.file_kinds import kind_of
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.regular_file import IrregularFileError, open_regular, read_at
from loopfeed.preprocess.sources.listing import ChangedSourceError, SourceError
from loopfeed.preprocess.system_errors import reading_remedy

_SEEN: ContextVar[dict[Path, tuple[int, ...]] | None] = ContextVar("_SEEN", default=None)


@dataclass(frozen=True)
class SourceFile:
    """An open file.

    Attributes:
        descriptor: the descriptor of the file, which is only read with `pread`. A mapped file that is cut while it is
            read would end the process.
        path: the path of the file.
        num_bytes: its length in bytes when it was opened.
        modified_ns: its modification time in ns when it was opened.
        changed_ns: the time in ns of the last change of its inode when it was opened, which nobody can set.
    """

    descriptor: int
    path: Path
    num_bytes: int
    modified_ns: int
    changed_ns: int = 0

    @property
    def identity(self) -> tuple[int, ...]:
        """What differs if another file is in its place, or it was written to."""
        return self.num_bytes, self.modified_ns, self.changed_ns

    def check_unchanged(self) -> None:
        """Check that the file is unchanged, so that offsets found earlier are still valid.

        Raises:
            ChangedSourceError: the file was modified after it was opened.
        """
        status = os.fstat(self.descriptor)
        if (status.st_size, status.st_mtime_ns) != (self.num_bytes, self.modified_ns):
            raise ChangedSourceError(f"{printable(self.path)} has changed since it was listed")

    def read(self, offset: int, size: int) -> bytes:
        """Return the `size` bytes that start at `offset`. May be called from any thread.

        Raises:
            OSError: the file cannot be read, or is too short.
        """
        content = read_at(self.descriptor, size, offset)
        if len(content) < size:
            raise OSError(
                f"{printable(self.path)} ends at byte {offset + len(content)}, "
                f"{quantity(size - len(content), 'byte')} too early; download it again"
            )
        return content

    def read_unchanged(self, offset: int, size: int) -> bytes:
        """Return the `size` bytes that start at `offset`, which are those that were listed.

        Raises:
            OSError: as `read`.
            ChangedSourceError: the file was modified after it was opened, before or while it was read.
        """
        self.check_unchanged()
        content = self.read(offset, size)
        self.check_unchanged()
        return content

    def head(self, size: int) -> bytes:
        """Return the first `size` bytes, or all of a shorter file.

        Raises:
            SourceError: the file cannot be read.
        """
        try:
            return read_at(self.descriptor, size, 0)
        except OSError as error:
            raise SourceError(
                f"{printable(self.path)} cannot be read: {error.strerror}; {reading_remedy(error, 'check the disk')}"
            ) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


@dataclass(frozen=True)
class StoredImages:
    """Encoded images in one file, by their offsets."""

    file: SourceFile

    def read(self, name: str, offset: int, size: int) -> bytes:  # noqa: ARG002 - the offset is sufficient
        """Return the `size` bytes at `offset`.

        Raises:
            OSError: the file cannot be read, or was written to after it was opened.
        """
        return self.file.read_unchanged(offset, size)

    def close(self) -> None:
        """Close the file."""
        self.file.close()


@contextmanager
def listing_the_same_files() -> Iterator[None]:
    """Refuse a file that is not the one that was opened before under its path: offsets and labels found then are of it.

    Layouts read a file several times: to recognise it, for its labels, and for its images.
    """
    token = _SEEN.set({})
    try:
        yield
    finally:
        _SEEN.reset(token)


def open_source_file(path: Path) -> SourceFile:
    """Open a file of a source. The caller must close it.

    Raises:
        SourceError: the file cannot be opened, is not a regular file, or was replaced while it was listed.
    """
    try:
        descriptor = open_regular(path)
    except IrregularFileError as error:
        raise SourceError(
            f"{printable(path)} is not a file; give the folder or archive that contains the images"
        ) from error
    except OSError as error:
        raise SourceError(
            f"{printable(path)} cannot be opened: {error.strerror}; {reading_remedy(error, 'check its path')}"
        ) from error
    status = os.fstat(descriptor)
    file = SourceFile(descriptor, path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    seen = _SEEN.get()
    if seen is not None and seen.setdefault(path, file.identity) != file.identity:
        file.close()
        raise SourceError(f"{printable(path)} was replaced or written to while it was listed; run the command again")
    return file


def not_as_named(path: Path, head: bytes, what: str) -> SourceError:
    """Return the error for a file that begins with the bytes `head`, and should be `what` ("a Parquet file")."""
    shown, kind = printable(path), kind_of(head)
    if not head:
        return SourceError(f"{shown} is an empty file instead of {what}; download it again")
    if kind is not None:
        remedy = kind.remedy if kind.is_lost else "give it the name of what it is, or remove it"
        return SourceError(f"{shown} is {kind.name}, not {what}; {remedy}")
    return SourceError(f"{shown} is not {what}: it begins with {head[:8].hex(' ')}; download it again, or remove it")
