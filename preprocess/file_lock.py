"""An exclusive lock on a file, which the kernel frees when its process dies, however it dies.

Owns how such a file is made and locked. What the lock permits, and what whoever comes second is told, belongs to those
who take one: `preprocess.packing.owner` for a split that is packed, `engine.records.folder_lock` for the folder of a
    run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from preprocess.regular_file import check_regular

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What file systems without locks answer, some network ones among them."""

# Whoever looks whether a file is locked holds it for microseconds: who comes in that instant tries again.
_TRIES = 20
_TRY_EVERY_S = 0.01


class FileLockedError(Exception):
    """Another process, or another holder in this one, has the lock."""


def lock_file(path: Path) -> int:
    """Lock the file at ``path``, made if need be, and return its descriptor, which the caller closes.

    The file returned is still the one of its name. Whoever removes it must hold the lock meanwhile: then nobody can
    come to hold a file that is no longer there. On a file system without locks everybody is let in.

    Raises:
        FileLockedError: it is held already, in this process or another.
        OSError: the file cannot be made or locked, or is none.
    """
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_TRY_EVERY_S)
        descriptor = _try_to_lock(path)
        if descriptor is not None:
            return descriptor
    raise FileLockedError(path)


def _try_to_lock(path: Path) -> int | None:
    """Open and lock the file; None where another has the lock, or had it and removed the file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    is_ours = False
    try:
        check_regular(os.fstat(descriptor), path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        with suppress(FileNotFoundError):
            is_ours = os.path.samestat(os.fstat(descriptor), path.stat())
        return descriptor if is_ours else None
    finally:
        if not is_ours:
            os.close(descriptor)
