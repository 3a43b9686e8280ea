"""An exclusive lock on a run folder, and whether the folder can ever hold a snapshot.

The kernel releases the lock if the process dies for any reason. TensorStore, which writes the arrays, needs paths in
UTF-8, `fcntl` locks, and syncs of files and folders; a snapshot then gets its name by the rename of a folder. Not every
network or FUSE file system offers these, and no setting of Orbax does without them. Instead of a list of such needs,
this module does once what a snapshot does, with small files.

Knows nothing about the other contents of a run folder.
"""

import fcntl
import gc
import io
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from loopfeed.preprocess.file_lock import NO_LOCKS, FileLockedError, LockRefusedError, describe_failure, lock_file
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.regular_file import open_regular, remove_tree
from loopfeed.preprocess.synced_folders import sync_folder
from loopfeed.preprocess.system_errors import Cause, cause_of, remedy_of, system_reason

UNFINISHED = ".unfinished"
"""The folder in which a snapshot, and this trial, is written before it gets its name."""
_FILE = "manifest"
# As in a snapshot: `state.orbax-checkpoint-tmp/ocdbt.process_0/d/` and the name of a file of 32 digits.
_LONGEST_INNER = ("state.orbax-checkpoint-tmp", "ocdbt.process_0", "d", 32 * "0")
_ELSEWHERE = "choose a folder on another file system (--run-dir)"


def true_path(folder: Path) -> Path:
    """Return the absolute path of a folder without "..".

    Orbax takes ".." away together with the name before it, which leads elsewhere if that folder is a link.
    """
    return folder.resolve() if ".." in folder.parts else folder.absolute()


def check_path_is_text(folder: Path) -> None:
    """Raise ValueError if the absolute path of a folder is not UTF-8, because TensorStore takes no other paths."""
    path = str(true_path(folder))
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"the path of a run folder must be UTF-8, as snapshots need it, but {printable(path)} is not: choose "
            "another path (--run-dir), or rename that folder"
        ) from None


def check_can_hold_snapshots(folder: Path) -> None:
    """Write, lock, sync and rename what a snapshot does, and remove it again.

    Args:
        folder: an existing folder, in which no other process writes snapshots.

    Raises:
        ValueError: if one of these is impossible; the message names it.
    """
    check_path_is_text(folder)
    trial = true_path(folder) / UNFINISHED
    doing = "a folder cannot be created"
    try:
        remove_tree(trial)
        place = trial / secrets.token_hex(4)
        written, renamed = place / "0", place / "1"
        (inner := written.joinpath(*_LONGEST_INNER)).parent.mkdir(parents=True)
        doing = "a file cannot be written, locked and synced"
        _write(inner.parent)
        _write(written)
        doing = "a folder cannot be synced"
        sync_folder(written)
        doing = "a folder cannot be renamed"
        written.rename(renamed)
        sync_folder(place)
    except Exception as error:  # TensorStore raises exceptions of many types
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"a run folder must be able to hold snapshots, but in {folder} {doing} "
            f"({system_reason(error) or words}): {_remedy(error)}"
        ) from error
    finally:
        remove_tree(trial)


def _write(folder: Path) -> None:
    import tensorstore as ts

    store = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    store.write(_FILE, b"{}").result()


def _remedy(error: BaseException) -> str:
    cause = cause_of(error)
    if cause is None:
        return f"check that folder, or {_ELSEWHERE}"
    if cause in (Cause.OTHER, Cause.ABILITY, Cause.TAKEN, Cause.MISSING):
        return _ELSEWHERE
    return remedy_of(error) if cause != Cause.PASSING else f"{remedy_of(error)}, or {_ELSEWHERE}"


LOCK_NAME = ".lock"

_LONGEST_RECORD_BYTES = 4096
_LEFT = "left"


class FolderInUseError(ValueError):
    """Raised if the folder is already locked by this process or another process."""


class _LockFile(io.FileIO):
    """A file that closes itself, without the warning of Python, when the last reference to it is gone."""

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()


class FolderLock:
    """A context manager for an exclusive `flock` on a folder's `.lock` file; only the holder may work in the folder.

    Releasing the lock empties the file and leaves it in place; only the holder of the lock may remove it. On a file
    system without locks, every process obtains the lock (`loopfeed.preprocess.file_lock`).

    Args:
        folder: an existing, writable folder.
        leftover: the name of a file in it that, if it is there already, is an earlier holder's (`is_leftover`).
    """

    def __init__(self, folder: Path, leftover: str | None = None) -> None:
        self._folder, self._path, self._leftover = folder, folder / LOCK_NAME, leftover
        # Closed, and so unlocked, also where an interruption keeps `release` from being called.
        self._file: _LockFile | None = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Acquire the lock without waiting, and record this process in the lock file.

        Raises:
            FolderInUseError: the lock is already held, by this process or another.
            ValueError: the file cannot be created.
        """
        try:
            self._file = _LockFile(self._lock(), "r+")
        except FileLockedError as error:
            raise self._in_use() from error
        except OSError as error:
            raise self._unusable(error) from error
        left = {} if self._leftover is None else {_LEFT: _identity(self._folder / self._leftover)}
        _write_record(self._file.fileno(), left)

    def _lock(self) -> int:
        try:
            return lock_file(self._path)
        except FileLockedError:
            record = _read_record(self._path)
            if record != (os.getpid(), os.uname().nodename):
                raise
            # A run of this process that was interrupted may be kept by a cycle of references, as exceptions make them.
            gc.collect()
            return lock_file(self._path)

    def check(self) -> None:
        """Check that `acquire` would succeed, without creating the lock file or disturbing a holder.

        Raises:
            ValueError: as `acquire`.
        """
        try:
            with os.fdopen(open_regular(self._path), "rb") as file:
                is_held = _is_held(file.fileno())
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._unusable(error) from error
        if is_held:
            raise self._in_use()

    def _in_use(self) -> FolderInUseError:
        record = _read_record(self._path)
        holder = "another process" if record is None else f"process {record[0]} on host {record[1]}"
        return FolderInUseError(f"{self._folder} is in use by {holder}: wait for it to end, or stop it")

    def _unusable(self, error: OSError) -> ValueError:
        return ValueError(
            f"{self._folder} must be a folder that can be locked, but {describe_failure(self._path, error, 'folder')}"
        )

    def release(self) -> None:
        """Release the lock if it is held."""
        if self._file is None or self._file.closed:
            return
        try:
            # A forked child shares the lock, and would keep it after the file is closed here.
            with suppress(OSError):
                self._file.truncate(0)
                fcntl.flock(self._file, fcntl.LOCK_UN)
        finally:
            with suppress(OSError):  # it must not hide another error
                self._file.close()

    def is_in_place(self) -> bool:
        """Return whether the lock file is in place, that is, whether the folder was neither removed nor emptied."""
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except (OSError, ValueError):  # ValueError: it is released
            return False

    def is_taken(self) -> bool:
        """Return whether the folder was emptied while locked, and another process has since created a lock in it."""
        try:
            return self._file is not None and not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except (OSError, ValueError):  # there is none, it is released, or the disk fails, which says nothing about it
            return False


def is_leftover(folder: Path, name: str) -> bool:
    """Return whether a file was there before the present holder of a folder's lock acquired it; False without a holder.

    The holder recorded the file as it was then: dates say nothing, because a clock may have been set meanwhile.
    """
    with suppress(OSError):
        found = _identity(folder / name)
        if not found or not is_locked(folder):
            return False
        record = _read_json(folder / LOCK_NAME)
        if record is not None and _LEFT in record:
            return bool(record[_LEFT] == found)
        # A holder of an earlier release, or one on a full disk: the lock file was written when it acquired the lock.
        return found[2] < (folder / LOCK_NAME).stat().st_mtime_ns
    return False


def _identity(path: Path) -> list[int]:
    """Return what tells a file from one that replaced it, the time of its last change last; empty without a file."""
    with suppress(OSError):
        status = path.stat()
        return [status.st_ino, status.st_size, status.st_mtime_ns]
    return []


def is_locked(folder: Path) -> bool:
    """Return whether a folder's lock is held, without disturbing the holder or creating the lock file.

    On a file system without locks, a record that was not cleared counts as a held lock.

    Raises:
        OSError: the file exists and cannot be read.
    """
    try:
        file = open_regular(folder / LOCK_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        is_held = _is_held(file)
        return os.fstat(file).st_size > 0 if is_held is None else is_held
    finally:
        os.close(file)


def _is_held(file: int) -> bool | None:
    """Return whether the lock of an open file is held, or None on a file system without locks."""
    try:
        # Shared, so that concurrent checks do not mistake each other for a holder.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise LockRefusedError(error.errno, error.strerror) from error
        return None
    return False


def was_killed(folder: Path) -> bool:
    """Return whether a process on this machine died without releasing a folder's lock.

    Return False for processes on other machines.

    Raises:
        OSError: as `is_locked`.
    """
    # Read the record before the lock, so that a process that takes over in between is seen to hold it.
    record = _read_record(folder / LOCK_NAME)
    return record is not None and record[1] == os.uname().nodename and not is_locked(folder)


def _write_record(file: int, more: Mapping[str, Any]) -> None:
    """Write the ID and host of this process to the locked file, and what else is given."""
    record = json.dumps({"pid": os.getpid(), "host": os.uname().nodename, **more}).encode()
    # The record only serves messages: the lock holds without it, for example on a full disk.
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, record, 0)


def _read_record(path: Path) -> tuple[Any, Any] | None:
    """Return the process ID and host recorded in a lock file, or None if they cannot be read."""
    record = _read_json(path)
    return None if record is None or not {"pid", "host"} <= record.keys() else (record["pid"], record["host"])


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            record: Any = json.loads(file.read(_LONGEST_RECORD_BYTES))
        return record if isinstance(record, dict) else None
    except (OSError, ValueError, RecursionError):
        return None
