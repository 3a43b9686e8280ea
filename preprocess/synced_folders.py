"""Makes folders that survive a power failure, together with the files in them.

POSIX promises that a new file or folder can be found again only once the folder that contains it is synced.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path

from loopfeed.preprocess.regular_file import raise_error

UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""The errors of file systems that can't sync a file or a folder; they keep it in another way, or not at all."""


def make_folders(folder: Path) -> None:
    """Create a folder and those above it that do not exist, and sync each folder that gets a new entry.

    Raises:
        OSError: a folder can't be created or synced.
    """
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)


def can_sync_folders(folder: Path) -> bool:
    """Return whether the file system of a folder, which need not exist yet, can sync folders."""
    while not folder.exists():
        folder = folder.parent
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True  # whoever writes there will say what is wrong
    try:
        os.fsync(descriptor)
    except OSError as error:
        return error.errno not in UNSUPPORTED
    finally:
        os.close(descriptor)
    return True


def sync_folder(folder: Path) -> None:
    """Write the entries of a folder to its disk; do nothing on a file system that does not support that.

    Raises:
        OSError: the disk fails.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Write all files below a folder, and the entries of all folders, to the disk, innermost first.

    Raises:
        OSError: the disk fails, or a file can't be opened or a folder listed.
    """
    for inner, _, names in os.walk(folder, topdown=False, onerror=raise_error):
        for name in names:
            with suppress(FileNotFoundError):  # deleted in the meantime, or a broken link
                sync_file(Path(inner, name))
        sync_folder(Path(inner))


def sync_file(path: Path) -> None:
    """Write the content of a file to its disk.

    Raises:
        OSError: the disk fails, or the file can't be opened.
    """
    # Not to wait for the writer of a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
