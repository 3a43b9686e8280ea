"""Keeps what is written below a folder that the user named inside that folder: no symbolic link in it is followed.

The path that the user named may itself be a link, or lead through one. Below it, a link in the place of a file or a
folder that is written, cut or removed is an error, because the folder may be somebody else's, and the link may lead to
any file of the user. Reading follows links.
"""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from loopfeed.preprocess.regular_file import IrregularFileError

# Not every system has the flag.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class LinkedPathError(IrregularFileError):
    """Error raised when a symbolic link is in the place of a file or a folder that is written."""

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "LinkedPathError":
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
