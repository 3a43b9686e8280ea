"""A log in a run folder, written line by line, with a running digest of its content.

Ensures that a line is written whole or not at all, and that the path still refers to the open file. Must not know: what
a line means.
"""

import errno
import os
import time
from pathlib import Path

from engine.records.digests import LogState, RunningDigest
from engine.records.file_errors import LostFileError, name_file
from engine.records.limits import LONGEST_LINE_BYTES
from preprocess.regular_file import check_regular, open_regular

# How often an append checks that the file is still in its place: the check takes 2 µs, and an append 10.
_CHECK_EVERY_S = 1.0
_READ_BYTES = 1 << 20
# The errors of file systems that cannot sync a file.
_NOT_OFFERED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
# O_NONBLOCK: not to wait for the reader of a pipe, which is then refused.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK


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
        self._sync_error: OSError | None = None

    def open(self) -> None:
        """Open the file for appending, and remove the last line if a crash truncated it.

        Raises:
            ValueError: if the file does not consist of lines, or its size differs from that of `begun`.
            OSError: if it cannot be opened, or is a pipe or a device.
        """
        try:
            self._file = os.open(self._path, _FLAGS, 0o666)
        except OSError as error:
            name_file(error, self._path)
            raise
        try:
            check_regular(os.fstat(self._file), self._path)
            self._length = self._complete_lines_size()
            if self._length < os.fstat(self._file).st_size:
                os.ftruncate(self._file, self._length)
            self._continue_digest()
        except BaseException:
            self.close()
            raise

    def _continue_digest(self) -> None:
        if self._begun is None:
            self._digest = RunningDigest()
            while part := os.pread(self._file, _READ_BYTES, self._digest.num_bytes):
                self._digest.update(part)
        elif self._begun.num_bytes != self._length:
            raise ValueError(
                f"{self._path} must contain the {self._begun.num_bytes:,} bytes that this run wrote to it, but "
                f"contains {self._length:,}: do not let another program write to it during the run"
            )

    def _complete_lines_size(self) -> int:
        """Return the size of the file up to the end of its last complete line."""
        size = os.fstat(self._file).st_size
        if size == 0:
            return 0
        start = max(0, size - LONGEST_LINE_BYTES)
        end = os.pread(self._file, size - start, start)
        if start and b"\n" not in end:
            raise ValueError(
                f"{self._path} must be a log of a run, but its last line is longer than any line of such a log: "
                "choose another file"
            )
        return start + end.rfind(b"\n") + 1

    def append(self, text: str) -> None:
        """Append a line; `text` does not include the newline.

        Raises:
            OSError: if it cannot be written, in which case none of it is; LostFileError if the path no longer names the
                open file, which is checked once a second.
        """
        line = (text + "\n").encode()
        try:
            # A nearly full disk writes what fits and reports the error at the next call: make that call.
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            if os.fstat(self._file).st_size > self._length:
                os.ftruncate(self._file, self._length)
            name_file(error, self._path)
            raise
        self._length += len(line)
        self._digest.update(line)
        if time.monotonic() >= self._checked_at + _CHECK_EVERY_S:
            self.check_place()

    def state(self) -> LogState:
        """Return the size and digest of what this run appended in all its launches; may be called from any thread."""
        return self._digest.state()

    def check_place(self) -> None:
        """Raise LostFileError if the path no longer refers to the open file; do nothing if no file is open."""
        self._checked_at = time.monotonic()
        if self._file < 0:
            return
        try:
            is_there = os.path.samestat(os.fstat(self._file), self._path.stat())
        except OSError:
            is_there = False
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
        except FileNotFoundError:
            raise LostFileError.of(self._path) from None
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                name_file(error, self._path)
                self._sync_error = error
        finally:
            if file not in (-1, self._file):
                os.close(file)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
