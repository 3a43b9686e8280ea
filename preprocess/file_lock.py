"""An exclusive file lock that the kernel releases when the process that holds it ends for any reason.

This module creates and locks the file. Its callers define what the lock permits and the message if it is taken:
`loopfeed.preprocess.packing.owner` for a split that is being packed, `loopfeed.engine.records.folder_lock` for a run
folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from loopfeed.preprocess.regular_file import IrregularFileError, check_regular, close_quietly, open_unlinked
from loopfeed.preprocess.system_errors import Cause, cause_of, remedy_of

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""The errors of file systems without locks, including some network file systems."""

# Checking whether a file is locked takes the lock for microseconds, so a failed attempt is repeated.
_TRIES = 20
_TRY_EVERY_S = 0.01


class FileLockedError(Exception):
    """Error raised when the lock is already held, by this process or another."""


class LockRefusedError(OSError):
    """Error raised when the file can be opened but the operating system does not lock it."""


def lock_file(path: Path) -> int:
    """Lock the file at ``path``, creating it if necessary, and return its descriptor, which the caller must close.

    The file still exists at ``path`` once it is locked. Only the holder of the lock may remove the file, so that no
    process can hold a lock on a removed file. On a file system without locks, every call succeeds.

    Raises:
        FileLockedError: the lock is already held, by this process or another.
        LockRefusedError: the operating system does not lock the file.
        OSError: the file cannot be created, is a link, or is not a regular file.
    """
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_TRY_EVERY_S)
        descriptor = _try_to_lock(path)
        if descriptor is not None:
            return descriptor
    raise FileLockedError(path)


def describe_failure(path: str | os.PathLike[str], error: OSError, place: str) -> str:
    """Return the end of an error message: what is wrong with the lock file, and what to do.

    Args:
        path: the lock file as the message names it.
        error: what `lock_file` raised.
        place: what the user chose, such as "folder".
    """
    reason = error.strerror or error
    if isinstance(error, LockRefusedError):
        first = f"{remedy_of(error)}, or " if cause_of(error) == Cause.PASSING else ""
        return f"{path} cannot be locked ({reason}): {first}choose another {place}, on a file system with file locks"
    if isinstance(error, (IrregularFileError, IsADirectoryError)):
        return f"{path} cannot be used as a lock ({reason}): remove it"
    if cause_of(error) == Cause.RIGHTS:
        return f"{path} cannot be opened ({reason}): correct its permissions, or choose another {place}"
    if cause_of(error) in (None, Cause.OTHER, Cause.TAKEN, Cause.MISSING):
        return f"{path} cannot be opened ({reason}): choose another {place}"
    return f"{path} cannot be opened ({reason}): {remedy_of(error)}, or choose another {place}"


def _try_to_lock(path: Path) -> int | None:
    """Open and lock the file; return None if it is locked elsewhere, or was removed by its previous holder."""
    descriptor = open_unlinked(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
    is_ours = False
    try:
        check_regular(os.fstat(descriptor), path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise LockRefusedError(error.errno, error.strerror, os.fspath(path)) from error
        with suppress(FileNotFoundError):
            is_ours = os.path.samestat(os.fstat(descriptor), path.stat())
        return descriptor if is_ours else None
    finally:
        if not is_ours:
            close_quietly(descriptor)
