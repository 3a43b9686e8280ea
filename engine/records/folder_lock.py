"""One process at a time in a run folder: a lock that the kernel frees when its process dies, however it dies.

Knows nothing of what a run folder holds besides.
"""

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from preprocess.file_lock import NO_LOCKS, FileLockedError, lock_file
from preprocess.regular_file import open_regular

LOCK_NAME = ".lock"

_LONGEST_RECORD_BYTES = 4096


class FolderInUseError(ValueError):
    """Another process, or another holder in this one, works in the folder."""


class FolderLock:
    """The right to work in a folder: an exclusive `flock` on its file `.lock`; a context manager.

    The file stays when the lock is released, empty; whoever removes it must hold the lock meanwhile. On a file system
    without locks everybody is let in (`preprocess.file_lock`).

    Args:
        folder: that exists and may be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / LOCK_NAME
        self._file = -1

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Takes the lock and notes this process in it; waits for nobody.

        Raises:
            FolderInUseError: where it is held already, in this process or another.
            ValueError: where the file cannot be made.
        """
        try:
            self._file = lock_file(self._path)
        except FileLockedError as error:
            raise FolderInUseError(
                f"{self._folder} is in use by {_holder(self._path)}: wait for it or stop it"
            ) from error
        except OSError as error:
            raise ValueError(
                f"{self._folder} must be a folder that may be written, {self._path} cannot be opened "
                f"({error.strerror}): choose another or mend its permissions"
            ) from error
        _write_record(self._file)

    def release(self) -> None:
        """Frees the lock; does nothing where it is not held."""
        if self._file < 0:
            return
        file, self._file = self._file, -1
        try:
            # A child made by `fork` shares the lock, and would keep it after the file is closed here.
            with suppress(OSError):
                os.ftruncate(file, 0)
                fcntl.flock(file, fcntl.LOCK_UN)
        finally:
            os.close(file)

    def is_in_place(self) -> bool:
        """Return whether the lock's file is still the one of its name: the folder was neither removed nor emptied."""
        try:
            return self._file >= 0 and os.path.samestat(os.fstat(self._file), self._path.stat())
        except OSError:
            return False

    def is_taken(self) -> bool:
        """Return whether the folder was emptied while it was held, and another process has made a lock there since."""
        return self._file >= 0 and not self.is_in_place() and self._path.exists()


def held_since_ns(folder: Path) -> int | None:
    """Gives when whoever holds the lock of a folder took it, in ns since the epoch; None where nobody is known to."""
    try:
        return (folder / LOCK_NAME).stat().st_mtime_ns if is_locked(folder) else None
    except OSError:
        return None


def is_locked(folder: Path) -> bool:
    """Tells whether somebody holds the lock of a folder, without disturbing him and without making its file.

    Where the file system has no locks, the record of a holder that did not release it counts as one.

    Raises:
        OSError: where the file is there and cannot be read.
    """
    try:
        file = open_regular(folder / LOCK_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        # Shared, so that those who look do not see each other.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return os.fstat(file).st_size > 0
    finally:
        os.close(file)
    return False


def was_killed(folder: Path) -> bool:
    """Tells whether a holder on this machine died without releasing the lock of a folder; of other machines' never.

    Raises:
        OSError: as `is_locked`.
    """
    # The record before the lock: one that takes over in between is seen to hold it.
    record = _read_record(folder / LOCK_NAME)
    return record is not None and record[1] == os.uname().nodename and not is_locked(folder)


def _write_record(file: int) -> None:
    """Notes this process in the file that it has locked."""
    record = json.dumps({"pid": os.getpid(), "host": os.uname().nodename}).encode()
    # Only for the words of whoever is refused: the lock holds without it, on a full disk too.
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, record, 0)


def _holder(path: Path) -> str:
    """Gives the holder in words, as far as the record tells."""
    record = _read_record(path)
    return "another process" if record is None else f"process {record[0]} on host {record[1]}"


def _read_record(path: Path) -> tuple[Any, Any] | None:
    """Gives process and host of the record, None where there is none that can be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            record: Any = json.loads(file.read(_LONGEST_RECORD_BYTES))
        return record["pid"], record["host"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
