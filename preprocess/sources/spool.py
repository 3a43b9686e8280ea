"""Keeps bytes that can be read only once, or only in their order, in a temporary file until they are packed.

The file has no name, so it disappears with the process. It needs room on its disk, but no memory. Must not know: what
the bytes mean.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.sources.listing import SourceError
from loopfeed.preprocess.sources.source_file import SourceFile
from loopfeed.preprocess.system_errors import is_out_of_room, reading_remedy

PIECE_BYTES = 1 << 20
_LEFT_FREE_BYTES = 256 * 2**20
_GIB = 2**30


class Spool:
    """A temporary file that is being written; use it as a context manager.

    Args:
        what: what is written, and how, for messages: "mnist.npz!x is compressed, and is unpacked into".
        folder: where the file is; None is the folder of temporary files.
        num_bytes: how many bytes will be written, at least about.
        remedy: what to do without room, beside making some.

    Raises:
        SourceError: there is no room for so many.
    """

    def __init__(
        self, what: str, folder: Path | None = None, *, num_bytes: int = 0, remedy: str = "set TMPDIR to a larger disk"
    ) -> None:
        self._what, self._remedy = what, remedy
        self.num_bytes = self._checked_bytes = 0
        try:
            self._folder = Path(tempfile.gettempdir()) if folder is None else folder
            self._check_room(num_bytes)
            # `finished` or `__exit__` closes it.
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=PIECE_BYTES)  # noqa: SIM115
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
        except OSError:  # of what was not flushed; an error is already on its way
            return

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            SourceError: the disk has no room for them.
        """
        try:
            if self.num_bytes >= self._checked_bytes:
                self._check_room(_LEFT_FREE_BYTES)
                self._checked_bytes += _LEFT_FREE_BYTES // 2
            self._file.write(content)
        except OSError as error:
            raise self._failed(error) from error
        self.num_bytes += len(content)

    def finished(self) -> SourceFile:
        """Return the file for reading, which the caller must close."""
        try:
            self._file.flush()
            descriptor = os.dup(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        status = os.fstat(descriptor)
        return SourceFile(descriptor, self._folder / "(a temporary file)", status.st_size, status.st_mtime_ns)

    def _check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if num_bytes > free:
            raise self._no_room(
                f"after {self.num_bytes / _GIB:.1f} GiB, {free / _GIB:.2f} of {num_bytes / _GIB:.2f} needed are free"
            )

    def _failed(self, error: OSError) -> SourceError:
        if is_out_of_room(error):
            return self._no_room("it is full")
        remedy = reading_remedy(error, self._remedy)
        return SourceError(f"{self._place()}, which cannot be written: {error.strerror or error}; {remedy}")

    def _no_room(self, found: str) -> SourceError:
        return SourceError(f"{self._place()}, which lacks room: {found}; make room, or {self._remedy}")

    def _place(self) -> str:
        return f"{self._what} a temporary file in {printable(getattr(self, '_folder', 'the usual folder'))}"
