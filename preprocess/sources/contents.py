"""Opens bytes that are stored in a container: a whole file, a gzip file, or a member of a zip archive.

What is compressed is unpacked into a temporary file without a name, which needs room on its disk but no memory, and
disappears with the process. Owns these files. Must not know: what the bytes mean.
"""

import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.sources.listing import SourceError
from loopfeed.preprocess.sources.source_file import SourceFile, open_source_file
from loopfeed.preprocess.sources.zipindex import member_pieces, stored_range
from loopfeed.preprocess.system_errors import is_out_of_room, reading_remedy

PIECE_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"
_GIB = 2**30


class Content(Protocol):
    """Some bytes in a container."""

    @property
    def where(self) -> str:
        """Its place, for messages: "mnist.npz!x_train"."""

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes from the first to the last; raise SourceError if they cannot be read or are damaged."""

    def open(self, num_bytes: int) -> tuple[SourceFile, int]:
        """Return an open file in which the bytes can be read at any offset, and the offset of the first.

        Args:
            num_bytes: how many there are; more are refused.
        """


@dataclass(frozen=True)
class FileContent:
    """The bytes of a file."""

    path: Path

    @property
    def where(self) -> str:
        """The path of the file."""
        return str(self.path)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the file."""
        file = open_source_file(self.path)
        try:
            for start in range(0, file.num_bytes, PIECE_BYTES):
                yield _read(file, start, min(PIECE_BYTES, file.num_bytes - start))
        finally:
            file.close()

    def open(self, num_bytes: int) -> tuple[SourceFile, int]:
        """Open the file, and check its length."""
        file = open_source_file(self.path)
        if file.num_bytes != num_bytes:
            file.close()
            raise wrong_length(self.where, file.num_bytes, num_bytes)
        return file, 0


@dataclass(frozen=True)
class GzipContent:
    """The bytes that a gzip file unpacks to."""

    path: Path

    @property
    def where(self) -> str:
        """The path of the file."""
        return str(self.path)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes that the file unpacks to; it may be several gzip streams, one after another."""
        unpacker, packed, is_first = zlib.decompressobj(wbits=31), b"", True
        pieces = FileContent(self.path).pieces()
        try:
            for packed in pieces:
                while packed:
                    if unpacker.eof:
                        unpacker = zlib.decompressobj(wbits=31)
                    yield unpacker.decompress(packed, PIECE_BYTES)
                    packed = unpacker.unconsumed_tail or unpacker.unused_data
                    is_first = False
                    if unpacker.eof and not packed.strip(b"\0"):
                        break
        except zlib.error as error:
            raise SourceError(f"{printable(self.path)} is a damaged gzip file: {error}; download it again") from error
        if is_first or not unpacker.eof:
            raise SourceError(f"{printable(self.path)} is a truncated gzip file; download it again")

    def open(self, num_bytes: int) -> tuple[SourceFile, int]:
        """Unpack the file."""
        return unpacked(self, num_bytes), 0


@dataclass(frozen=True)
class MemberContent:
    """The bytes of a member of a zip archive, whose entry in the directory is at `offset`."""

    path: Path
    name: str
    offset: int
    size: int

    @property
    def where(self) -> str:
        """The path of the archive and the name of the member."""
        return f"{self.path}!{self.name}"

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the member, and check their number and CRC-32."""
        file = open_source_file(self.path)
        try:
            yield from member_pieces(file, self.offset, self.size, printable(self.where))
        finally:
            file.close()

    def open(self, num_bytes: int) -> tuple[SourceFile, int]:
        """Open the archive or, if the member is compressed, unpack it."""
        if self.size != num_bytes:
            raise wrong_length(self.where, self.size, num_bytes)
        file = open_source_file(self.path)
        try:
            start, _, is_compressed = stored_range(file, self.offset)
        except BaseException:
            file.close()
            raise
        if not is_compressed:
            return file, start
        file.close()
        return unpacked(self, num_bytes), 0


def head_of(content: Content, size: int) -> bytes:
    """Return the first `size` bytes, or all if there are fewer."""
    head = b""
    pieces = content.pieces()
    for piece in pieces:
        head += piece
        if len(head) >= size:
            break
    pieces.close()  # type: ignore[attr-defined]
    return head[:size]


def load(content: Content, max_bytes: int) -> bytes:
    """Return all bytes of a content that has at most `max_bytes`.

    Raises:
        SourceError: it has more.
    """
    parts, left = [], max_bytes
    for piece in content.pieces():
        parts.append(piece)
        left -= len(piece)
        if left < 0:
            raise SourceError(
                f"{printable(content.where)} has more than the {max_bytes:,} bytes allowed for labels; use fewer images"
            )
    return b"".join(parts)


def unpacked(content: Content, num_bytes: int) -> SourceFile:
    """Return a temporary file without a name with all bytes of a content.

    Raises:
        SourceError: the content has another number of bytes, or there is no room for it.
    """
    return TemporaryBytes.filled(content.where, content.pieces(), num_bytes)


class TemporaryBytes:
    """A temporary file without a name that is being written, for what is in `where`.

    Args:
        where: what is unpacked, for messages.
        num_bytes: how many bytes will be written, at least about.

    Raises:
        SourceError: there is no room for so many.
    """

    def __init__(self, where: str, num_bytes: int) -> None:
        self._where, self._folder = printable(where), tempfile.gettempdir()
        self.num_bytes = 0
        free = shutil.disk_usage(self._folder).free
        if num_bytes > free:
            raise self._no_room(f"{num_bytes / _GIB:.1f} GiB are needed, {free / _GIB:.1f} GiB are free")
        self._file = tempfile.TemporaryFile(dir=self._folder, buffering=PIECE_BYTES)  # noqa: SIM115 - closed by `close`

    @classmethod
    def filled(cls, where: str, pieces: Iterable[bytes], num_bytes: int) -> SourceFile:
        """Return a file with exactly `num_bytes` bytes from `pieces`."""
        file = cls(where, num_bytes)
        try:
            for piece in pieces:
                file.write(piece)
                if file.num_bytes > num_bytes:
                    break
            if file.num_bytes != num_bytes:
                raise wrong_length(where, file.num_bytes, num_bytes)
            return file.finished()
        finally:
            file.close()

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes."""
        try:
            self._file.write(content)
        except OSError as error:
            raise self._failed(error) from error
        self.num_bytes += len(content)

    def finished(self) -> SourceFile:
        """Return the file for reading."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from error
        descriptor = os.dup(self._file.fileno())
        status = os.fstat(descriptor)
        return SourceFile(descriptor, Path(self._folder, "(a temporary file)"), status.st_size, status.st_mtime_ns)

    def close(self) -> None:
        """Close the file for writing; what `finished` returned stays open."""
        try:
            self._file.close()
        except OSError:  # of what was not flushed; an error is already on its way
            return

    def _failed(self, error: OSError) -> SourceError:
        if is_out_of_room(error):
            return self._no_room("it is full")
        return SourceError(f"{self._where} cannot be unpacked in {printable(self._folder)}: {error.strerror}")

    def _no_room(self, found: str) -> SourceError:
        return SourceError(
            f"{self._where} is compressed, and is unpacked into a temporary file in {printable(self._folder)}, which "
            f"lacks room: {found}; set TMPDIR to a folder with more"
        )


def wrong_length(where: str, found: int, expected: int) -> SourceError:
    """Return the error for bytes of another number than their header says."""
    how = "truncated" if found < expected else "damaged"
    compared = f"more than {expected:,}" if found > expected else f"{found:,} instead of {expected:,}"
    return SourceError(f"{printable(where)} is {how}: it has {compared} bytes; download it again")


def _read(file: SourceFile, start: int, size: int) -> bytes:
    try:
        return file.read(start, size)
    except OSError as error:
        raise SourceError(
            f"{printable(file.path)} cannot be read at byte {start}: {error.strerror or error}; "
            f"{reading_remedy(error, 'download it again')}"
        ) from error
