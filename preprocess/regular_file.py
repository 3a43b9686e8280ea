"""Opens and reads regular files. Pipes and devices are refused, and the number of bytes read is limited.

All local files of packs, run folders and sources are opened for reading with this module.

No symbolic link below a folder that the user named is followed by what is written. The path that the user named may
itself be a link, or lead through one. Below it, a link in the place of a file or a folder that is written, cut or
removed is an error, because the folder may be somebody else's, and the link may lead to any file of the user. Reading
follows links.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Buffer, Sequence
from contextlib import suppress
from pathlib import Path

from loopfeed.preprocess.system_errors import status_of

# Not every system has all of these flags. Windows needs O_BINARY, and has no pipes in its file system.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))

# Inode, size in bytes, and the times of the last change of content and inode in ns. They differ if the file was
# replaced or written to, even if its modification time was reset.
type FileIdentity = tuple[int, int, int, int]

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


class IrregularFileError(OSError):
    """Error raised when a path leads to a pipe, a device, a socket or a folder instead of a regular file."""


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading without blocking, and return its descriptor. Links are followed.

    Anything else is not even opened, because opening a tape rewinds it and opening a watchdog arms it.

    Raises:
        IrregularFileError: the path leads to something else, such as a pipe without a writer.
        OSError: there is no such file, or it may not be read.
    """
    check_regular(os.stat(path), path)  # noqa: PTH116 - making a Path takes twice the time of the call
    descriptor = os.open(path, _FLAGS)
    try:
        # Check again: the file may have been replaced in the meantime.
        check_regular(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def close_quietly(descriptor: int) -> None:
    """Close a file that holds nothing which is not safe: a lock, or one that was only read, or is synced.

    On file servers a close may fail. The file is closed nevertheless, and the error must not hide another one, or make
    a failure of what has succeeded.
    """
    with suppress(OSError):
        os.close(descriptor)


def check_regular(status: os.stat_result, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
    """Check that ``status``, the result of ``stat`` for ``path``, describes a regular file.

    Raises:
        IrregularFileError: ``path`` is not a regular file.
        OSError: the file is larger than ``max_bytes`` (EFBIG).
    """
    if not stat.S_ISREG(status.st_mode):
        raise IrregularFileError(errno.EINVAL, f"it is {kind_of(status.st_mode)}, not a file", os.fspath(path))
    if max_bytes is not None and status.st_size > max_bytes:
        raise _too_large(path, max_bytes)


def kind_of(mode: int) -> str:
    """Return what is in the place of a regular file, such as "a folder", by its `st_mode`."""
    return _KINDS.get(stat.S_IFMT(mode), "a special file")


def identity_of(found: os.stat_result) -> FileIdentity:
    """Return the identity of a file, which changes when the file is replaced or written to."""
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_regular(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Read a whole regular file of at most ``max_bytes`` bytes.

    Raises:
        IrregularFileError: as `open_regular`.
        OSError: the file cannot be read, or is larger (EFBIG).
    """
    with open(open_regular(path), "rb", buffering=0) as file:
        check_regular(os.fstat(file.fileno()), path, max_bytes=max_bytes)
        parts, left = [], max_bytes
        # The reported size may be wrong, and the file may grow, so count the bytes that are read.
        while left >= 0 and (part := file.read(min(left + 1, 1 << 24))):
            parts.append(part)
            left -= len(part)
    if left < 0:
        raise _too_large(path, max_bytes)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Read ``size`` bytes of an open file at ``offset``; fewer only if the file ends before.

    One call of `pread` may return fewer bytes at any time, and does on network and FUSE file systems.

    Raises:
        OSError: the file cannot be read.
    """
    part = os.pread(descriptor, size, offset)
    if len(part) == size or not part:
        return part
    parts, num_bytes = [part], len(part)
    while num_bytes < size and (part := os.pread(descriptor, size - num_bytes, offset + num_bytes)):
        parts.append(part)
        num_bytes += len(part)
    return b"".join(parts)


def read_into(descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Fill ``buffers`` one after another from an open file at ``offset``, and return the number of bytes read.

    As with `read_at`, fewer bytes than the buffers hold are read only if the file ends before.

    Raises:
        OSError: the file cannot be read.
    """
    views = [memoryview(each).cast("B") for each in buffers]
    num_bytes = 0
    while views and (count := os.preadv(descriptor, views, offset + num_bytes)):
        num_bytes += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]
    return num_bytes


def _too_large(path: str | os.PathLike[str], max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"the file is larger than the {max_bytes:,} bytes allowed", os.fspath(path))


def is_regular(path: Path) -> bool:
    """Return whether ``path`` is a regular file or a link to one.

    Raises:
        OSError: that cannot be known, because it may not be looked at, or the disk or its server failed.
    """
    found = status_of(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def raise_error(error: OSError) -> None:
    """Raise an error; for `os.walk`, which takes a folder that it cannot list for an empty one otherwise."""
    raise error


# Not every system has the flag.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class LinkedPathError(IrregularFileError):
    """Error raised when a symbolic link is in the place of a file or a folder that is written."""

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> LinkedPathError:
        """Create the error for the link at `path`."""
        return cls(errno.ELOOP, "it is a link, through which nothing is written", os.fspath(path))


def open_unlinked(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a file like `os.open`, and return its descriptor, but never by a link in its place.

    Raises:
        LinkedPathError: the path is a symbolic link.
        OSError: as `os.open`.
    """
    try:
        return os.open(path, flags | _NO_LINK | getattr(os, "O_CLOEXEC", 0), mode)
    except OSError as error:
        if error.errno == errno.ELOOP or os.path.islink(path):  # noqa: PTH114 - may be a str
            raise LinkedPathError.of(path) from error
        raise


def check_unlinked(folder: Path, path: Path) -> None:
    """Raise LinkedPathError if `path`, or a folder between it and `folder` in which it is, is a symbolic link.

    Args:
        folder: the folder that the user named.
        path: a path below it, which need not exist.
    """
    inside = path.relative_to(folder)
    for each in (*reversed(inside.parents), inside):
        if each.parts and (folder / each).is_symlink():
            raise LinkedPathError.of(folder / each)


def remove_tree(path: Path) -> None:
    """Remove a folder with all that is in it as far as possible; of a link, remove the link alone."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
        return
    shutil.rmtree(path, ignore_errors=True)
