"""Opens bytes that are stored in a container: a whole file, a gzip file, or a member of a zip archive.

Must not know: what the bytes mean.
"""

import gzip
import os
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, cast

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.sources.archives import ZipArchive, open_archive
from loopfeed.preprocess.sources.listing import ChangedSourceError, SourceError
from loopfeed.preprocess.sources.source_file import SourceFile, open_source_file
from loopfeed.preprocess.sources.spool import PIECE_BYTES, Spool
from loopfeed.preprocess.sources.tarindex import Member
from loopfeed.preprocess.system_errors import reading_remedy

GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class Content:
    """Some bytes in a container.

    Attributes:
        where: their place, for messages: "mnist.npz!x_train".
        stream: opens them for reading from the first to the last.
        find: returns an open file that has them as they are, the offset of the first, and how many they are; None if
            they are compressed.
    """

    where: str
    stream: Callable[[], AbstractContextManager[IO[bytes]]]
    find: Callable[[], tuple[SourceFile, int, int] | None]

    def pieces(self, num_bytes: int = PIECE_BYTES) -> Generator[bytes]:
        """Yield the bytes from the first to the last, in pieces of `num_bytes`.

        Raises:
            SourceError: they cannot be read, or are damaged.
        """
        shown = printable(self.where)
        try:
            with self.stream() as stream:
                while piece := stream.read(num_bytes):
                    yield piece
        except EOFError as error:
            raise SourceError(f"{shown} is a truncated gzip file; download it again") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise SourceError(f"{shown} is a damaged gzip file: {error}; download it again") from error
        except OSError as error:
            remedy = reading_remedy(error, "download it again")
            raise SourceError(f"{shown} cannot be read: {error.strerror or error}; {remedy}") from error

    def open(self, num_bytes: int) -> tuple[SourceFile, int]:
        """Return an open file in which the bytes can be read at any offset, and the offset of the first.

        Args:
            num_bytes: how many there are.

        Raises:
            SourceError: there are more or fewer, or there is no room to unpack them.
        """
        if (found := self.find()) is not None:
            file, start, length = found
            if length != num_bytes:
                file.close()
                raise wrong_length(self.where, length, num_bytes)
            return file, start
        spool = Spool(f"{printable(self.where)} is compressed, and is unpacked into", num_bytes=num_bytes)
        with spool:
            for piece in self.pieces():
                spool.write(piece)
                if spool.num_bytes > num_bytes:
                    break
            if spool.num_bytes != num_bytes:
                raise wrong_length(self.where, spool.num_bytes, num_bytes)
            return spool.finished(), 0


def file_content(path: Path) -> Content:
    """Return the bytes of a file."""

    def find() -> tuple[SourceFile, int, int]:
        file = open_source_file(path)
        return file, 0, file.num_bytes

    return Content(str(path), partial(_stream_of, path), find)


def gzip_content(path: Path) -> Content:
    """Return the bytes that a gzip file unpacks to; it may be several gzip streams, one after another."""

    @contextmanager
    def stream() -> Iterator[IO[bytes]]:
        with _stream_of(path) as packed, gzip.GzipFile(fileobj=packed) as unpacked:
            yield cast("IO[bytes]", unpacked)

    return Content(str(path), stream, lambda: None)


def member_content(path: Path, member: Member) -> Content:
    """Return the bytes of a member of a zip archive."""
    where = f"{path}!{member.name}"

    @contextmanager
    def archive() -> Iterator[ZipArchive]:
        with closing(open_archive(path)) as found:
            if not isinstance(found, ZipArchive):
                raise ChangedSourceError(f"{printable(path)} has changed since it was listed")
            try:
                yield found
            except SourceError as error:
                raise SourceError(f"{printable(where)}: {error}") from error

    @contextmanager
    def stream() -> Iterator[IO[bytes]]:
        with archive() as found, found.stream(member.offset) as content:
            yield content

    def find() -> tuple[SourceFile, int, int] | None:
        with archive() as found:
            start = found.stored_at(member.offset)
        return None if start is None else (open_source_file(path), start, member.size)

    return Content(where, stream, find)


def head_of(content: Content, size: int) -> bytes:
    """Return the first `size` bytes, or all if there are fewer."""
    pieces = content.pieces(size)
    head = next(pieces, b"")
    pieces.close()
    return head


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


def wrong_length(where: str, found: int, expected: int) -> SourceError:
    """Return the error for bytes of another number than their header says."""
    how = "truncated" if found < expected else "damaged"
    compared = f"more than {expected:,}" if found > expected else f"{found:,} instead of {expected:,}"
    return SourceError(f"{printable(where)} is {how}: it has {compared} bytes; download it again")


def _stream_of(path: Path) -> IO[bytes]:
    return os.fdopen(open_source_file(path).descriptor, "rb")
