"""A log in a run folder, written line by line, with a running digest of its content.

Ensures that a line is written whole or not at all, and that the path still refers to the open file. Must not know: what
a line means.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from loopfeed.engine.records.digests import LogState, RunningDigest
from loopfeed.engine.records.file_errors import LostFileError, name_file
from loopfeed.engine.records.limits import LONGEST_LINE_BYTES
from loopfeed.preprocess.regular_file import check_regular, close_quietly, open_regular, open_unlinked, read_at
from loopfeed.preprocess.synced_folders import UNSUPPORTED, sync_folder

# How often an append checks that the file is still in its place: the check takes 2 µs, and an append 10.
_CHECK_EVERY_S = 1.0
_READ_BYTES = 1 << 20
# O_NONBLOCK: not to wait for the reader of a pipe, which is then refused.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK


class JsonLines:
    """A file to which lines are appended; each line is passed to the system immediately, in full or not at all.

    Args:
        path: the file.
        begun: the digest of the file's current content, which the appended lines continue; None computes it from the
            file.
    """

    def __init__(self, path: Path, begun: RunningDigest | None = None) -> None:
        self._path, self._begun = path, begun
        self._digest = RunningDigest() if begun is None else begun
        self._file, self._length = -1, 0
        self._checked_at = 0.0
        self._synced_bytes = 0
        self._is_entry_synced = False
        self._sync_error: OSError | None = None

    def open(self) -> None:
        """Open the file for appending, and remove the last line if a crash truncated it.

        Raises:
            ValueError: if the file does not consist of lines, or their size differs from that of `begun`; the file is
                then unchanged.
            OSError: if it cannot be opened or read, or is a link, a pipe or a device.
        """
        try:
            self._file = open_unlinked(self._path, _FLAGS)
        except OSError as error:
            name_file(error, self._path)
            raise
        try:
            status = os.fstat(self._file)
            check_regular(status, self._path)
            self._length = end_of_lines(self._file, 0, status.st_size)
            self._continue_digest(status.st_size - self._length)
            # Cut last, once the lines that are kept have been read and compared.
            if self._length < status.st_size:
                os.ftruncate(self._file, self._length)
        except OSError as error:
            self.close()
            if error.filename is None:
                name_file(error, self._path)
            raise
        except BaseException:
            self.close()
            raise

    def _continue_digest(self, torn_bytes: int) -> None:
        """Compute the digest of the complete lines, or compare their size; `torn_bytes` is that of the rest."""
        if self._begun is None:
            if torn_bytes > LONGEST_LINE_BYTES:
                raise ValueError(
                    f"{self._path} must be a log of a run, but its last line is longer than any line of such a log: "
                    "choose another file"
                )
            self._digest = RunningDigest()
            while (left := self._length - self._digest.num_bytes) > 0:
                self._digest.update(_read_whole(self._file, min(_READ_BYTES, left), self._digest.num_bytes))
        elif self._begun.num_bytes != self._length:
            raise ValueError(
                f"{self._path} must contain the {self._begun.num_bytes:,} bytes that this run wrote to it, but "
                f"contains {self._length:,}: do not let another program write to it during the run"
            )

    def append(self, text: str, confirm: Callable[[], bool] = lambda: True) -> bool:
        """Append a line; return whether it stays.

        Args:
            text: the line without the newline.
            confirm: called once the system has the line; if it returns False, the line is removed again.

        Raises:
            OSError: if it cannot be written, in which case none of it is, or cannot be removed; LostFileError if the
                path no longer names the open file, which is checked once a second.
        """
        line = (text + "\n").encode()
        try:
            # A nearly full disk writes what fits and reports the error at the next call: make that call.
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            self._cut(len(line))
            name_file(error, self._path)
            raise
        if not confirm():
            self._cut(len(line))
            return False
        self._length += len(line)
        self._digest.update(line)
        if time.monotonic() >= self._checked_at + _CHECK_EVERY_S:
            self.check_place()
        return True

    def _cut(self, most_bytes: int) -> None:
        """Remove what follows the last line that stays, unless it is more than this object can have written.

        Raises:
            OSError: if that is impossible; each later sync raises it again, because the file has more than its digest.
        """
        if not self._length < os.fstat(self._file).st_size <= self._length + most_bytes:
            return
        self._synced_bytes = -1  # what is removed may be on the disk already
        try:
            os.ftruncate(self._file, self._length)
        except OSError as error:
            name_file(error, self._path)
            self._sync_error = error
            raise

    def state(self) -> LogState:
        """Return the size and digest of what this run appended in all its launches; may be called from any thread."""
        return self._digest.state()

    def check_place(self) -> None:
        """Raise LostFileError if the path no longer refers to the open file; do nothing if no file is open.

        Raises:
            OSError: that cannot be known, because the disk or its server failed.
        """
        self._checked_at = time.monotonic()
        if self._file < 0:
            return
        try:
            is_there = os.path.samestat(os.fstat(self._file), self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        except OSError as error:
            name_file(error, self._path)
            raise
        if not is_there:
            raise LostFileError.of(self._path)

    def sync(self) -> None:
        """Sync all appended lines to the disk, including lines from earlier launches.

        A disk that failed once reports success at the next call even if data were lost, so each later call raises the
        error again. A file system that cannot sync a file is not an error.

        Raises:
            OSError: if the disk failed; LostFileError as in `check_place`, or if an earlier launch's file is gone.
        """
        num_bytes = self._digest.num_bytes  # another thread may append meanwhile
        if self._sync_error is None and num_bytes != self._synced_bytes:
            self._sync_file()
            self._synced_bytes = num_bytes
        if self._sync_error is not None:
            raise self._sync_error
        self.check_place()

    def _sync_file(self) -> None:
        """Sync the file, opening it if this launch has not opened it yet; store a disk error in `_sync_error`."""
        file = self._file
        try:
            if self._file < 0:
                file = open_regular(self._path)
            os.fsync(file)
            if not self._is_entry_synced:
                sync_folder(self._path.parent)
                self._is_entry_synced = True
        except FileNotFoundError:
            raise LostFileError.of(self._path) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                name_file(error, self._path)
                self._sync_error = error
        finally:
            if file not in (-1, self._file):
                close_quietly(file)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            close_quietly(self._file)  # what a snapshot or the result counts on was synced before
            self._file = -1


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a log with their newlines, one at a time, because a log may be large.

    A missing file has none. A last line without a newline is left out: it is being written, or a crash truncated it.

    Raises:
        ValueError: if a line is longer than any line of a log.
        OSError: if the file cannot be read.
    """
    with suppress(FileNotFoundError), os.fdopen(open_regular(path), "rb") as file:
        while (line := file.readline(LONGEST_LINE_BYTES)).endswith(b"\n"):
            yield line
        if len(line) == LONGEST_LINE_BYTES:
            raise ValueError(
                f"{path} must have lines of at most {LONGEST_LINE_BYTES:,} bytes, but one is longer: restore that file"
            )


def end_of_lines(file: int, start: int, stop: int) -> int:
    """Return where the last complete line of an open file ends, `start` if none ends in its bytes start … stop.

    Raises:
        OSError: if the file cannot be read, or ends before `stop`.
    """
    while stop > start:
        begin = max(start, stop - _READ_BYTES)
        newline = _read_whole(file, stop - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        stop = begin
    return start


def _read_whole(file: int, num_bytes: int, start: int) -> bytes:
    """Return bytes of an open file; raise OSError if it ends before them, because its other bytes must not be lost."""
    content = read_at(file, num_bytes, start)
    if len(content) < num_bytes:
        raise OSError(errno.EIO, f"it ends after {start + len(content):,} bytes, before its size")
    return content
