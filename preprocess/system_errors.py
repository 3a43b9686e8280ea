"""Describes errors of the operating system in one line: the file, what is wrong with it, and what to do.

Python's own text, such as "[Errno 27] File too large", names neither the remedy nor, if the file is already open, the
file. TensorStore reports the number of such an error within a longer text.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from preprocess.printable import printable

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}
_TAKEN = {errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY}
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
_STORE_NUMBER = re.compile(r"\[[^\]]*os_error_code='(\d+)'")


def system_number(error: BaseException) -> int | None:
    """Return the number of the system's error in an OSError or in an error of TensorStore, or None."""
    if isinstance(error, OSError):
        return error.errno
    found = _STORE_NUMBER.search(str(error))
    return None if found is None else int(found[1])


def system_reason(error: BaseException) -> str | None:
    """Return the system's text for the error, such as "File too large", or None if it is not an error of the system."""
    number = system_number(error)
    if number is None:
        return None
    return (error.strerror if isinstance(error, OSError) else None) or os.strerror(number)


def is_out_of_room(error: BaseException) -> bool:
    """Return whether a disk or a quota is full, or a file exceeds the limit on its size."""
    return system_number(error) in {*_NO_ROOM, errno.EFBIG}


def remedy_of(error: BaseException) -> str:
    """Return what to do about an error of the system, in the words of a command such as "make room on its disk"."""
    number = system_number(error)
    if number in _NO_ROOM:
        return "make room on its disk"
    if number == errno.EFBIG:
        return "raise the limit on the size of a file (ulimit -f), or use another disk"
    if number in _NO_PERMISSION:
        return "grant write permission"
    if number == errno.ELOOP:
        return "remove that link, or put what it leads to in its place"
    if number in _NO_DESCRIPTORS:
        return "allow more open files (ulimit -n)"
    if number in _TAKEN:
        return "choose another path, or move away what is there"
    return "check its folder and its disk"


def describe_system_error(error: OSError, path: str | os.PathLike[str] | None = None) -> str:
    """Return one line about an error: the file, the system's reason and the remedy.

    Args:
        error: the error; if it has no number, its own text is returned.
        path: the file, if the error does not name it.
    """
    if error.errno is None:
        return str(error)
    if error.errno == errno.ENOENT and not _has_working_folder():
        return "the current folder was removed: change to another folder (cd)"
    reason = system_reason(error)
    if error.filename is None and str(reason).startswith("No usable temporary directory"):
        return f"{reason}: make room there, or name a folder that can be written in $TMPDIR"
    name = error.filename if error.filename is not None else path
    if name is None or isinstance(name, int):
        return f"a file cannot be read or written ({reason}): {remedy_of(error)}"
    name = printable(os.fsdecode(name))
    if error.errno == errno.ENOENT:
        return f"{name} does not exist ({reason}): check the path and its folder"
    return f"{name} cannot be read or written ({reason}): {remedy_of(error)}"


@contextmanager
def naming_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name a file in each OSError that is raised in the block without the name of a file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # Pillow's encoders report no number
            raise OSError(f"{printable(path)} cannot be written ({error}): {remedy_of(error)}") from error
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def _has_working_folder() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - Path.cwd is the same call
    except FileNotFoundError:
        return False
    return True
