"""Opens files that may have been replaced by something else: a pipe or a device is refused, and reading is bounded.

Owns the one way in which packs, run folders and sources open what they read on this machine.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# Not every system has these; Windows needs O_BINARY, and has no pipes among its files.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))

# Inode, size in bytes, and when content and inode were changed last in ns: they tell a file from one that takes its
# place, and from what it was before somebody wrote to it, also where its time was put back.
type FileIdentity = tuple[int, int, int, int]

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class IrregularFileError(OSError):
    """A path leads to a pipe, a device, a socket or a folder where a regular file is expected."""


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading, without waiting, and return its descriptor; links are followed.

    Nothing else is opened: opening alone rewinds a tape, and arms a watchdog.

    Raises:
        IrregularFileError: there is something else, such as a pipe that nobody writes to.
        OSError: there is nothing, or it may not be read.
    """
    check_regular(Path(path).stat(), path)
    descriptor = os.open(path, _FLAGS)
    try:
        # Once more: something else may lie there by now.
        check_regular(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(status: os.stat_result, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
    """Check ``status``, of what lies at ``path``.

    Raises:
        IrregularFileError: it is not that of a regular file.
        OSError: the file is larger than ``max_bytes`` (EFBIG).
    """
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no regular file")
        raise IrregularFileError(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))
    if max_bytes is not None and status.st_size > max_bytes:
        raise _too_large(path, max_bytes)


def identity_of(found: os.stat_result) -> FileIdentity:
    """Return what tells a file from any other, and from itself before somebody wrote to it."""
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_regular(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Read a whole regular file of at most ``max_bytes``.

    Raises:
        IrregularFileError: as `open_regular`.
        OSError: the file cannot be read, or is larger (EFBIG).
    """
    with open(open_regular(path), "rb", buffering=0) as file:
        check_regular(os.fstat(file.fileno()), path, max_bytes=max_bytes)
        parts, left = [], max_bytes
        # Its size may be told wrongly, or grow: what is read is counted.
        while left >= 0 and (part := file.read(min(left + 1, 1 << 24))):
            parts.append(part)
            left -= len(part)
    if left < 0:
        raise _too_large(path, max_bytes)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(path: str | os.PathLike[str], max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"the file is larger than the {max_bytes:,} bytes allowed", os.fspath(path))


def is_regular(path: Path) -> bool:
    """Return whether a regular file lies at ``path``, or at the end of a link there; False where nobody may look."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False
