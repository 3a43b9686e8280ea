"""Describes errors of the operating system in one line: the file, what is wrong with it, and what to do.

Python's own text, such as "[Errno 27] File too large", names neither the remedy nor, if the file is already open, the
file. TensorStore reports the number of such an error, or of a store's answer, within a longer text.

This module alone decides what an error is caused by, and so what helps: a message asks `remedy_of` or `reading_remedy`.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

from loopfeed.preprocess.printable import printable


class Cause(Enum):
    """Why the system or a store refused an operation."""

    PASSING = auto()
    """The disk, the network or the server failed, perhaps only this time."""
    ROOM = auto()
    QUOTA = auto()
    SIZE = auto()
    MEMORY = auto()
    RIGHTS = auto()
    READ_ONLY = auto()
    NAME = auto()
    LINKS = auto()
    TAKEN = auto()
    DESCRIPTORS = auto()
    ABILITY = auto()
    """The file system lacks the operation."""
    MISSING = auto()
    CLOSED = auto()
    OTHER = auto()


_CAUSES = {
    Cause.PASSING: (
        *("EIO", "ESTALE", "ETIMEDOUT", "EAGAIN", "EINTR", "EBUSY", "ETXTBSY", "EREMOTEIO", "ECOMM", "EPROTO"),
        *("ECONNRESET", "ECONNREFUSED", "ECONNABORTED", "ENOTCONN", "ESHUTDOWN", "EPIPE"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENETRESET", "ENONET", "ENOLINK"),
    ),
    Cause.ROOM: ("ENOSPC",),
    Cause.QUOTA: ("EDQUOT",),
    Cause.SIZE: ("EFBIG",),
    Cause.MEMORY: ("ENOMEM", "ENOBUFS"),
    Cause.RIGHTS: ("EACCES", "EPERM"),
    Cause.READ_ONLY: ("EROFS",),
    Cause.NAME: ("ENAMETOOLONG", "EILSEQ"),
    Cause.LINKS: ("ELOOP", "EMLINK"),
    Cause.TAKEN: ("EEXIST", "EISDIR", "ENOTDIR", "ENOTEMPTY"),
    Cause.DESCRIPTORS: ("EMFILE", "ENFILE"),
    Cause.ABILITY: ("ENOSYS", "ENOTSUP", "EOPNOTSUPP", "ENOLCK", "EXDEV", "ENODEV"),
    Cause.MISSING: ("ENOENT",),
    Cause.CLOSED: ("EBADF",),
}
# Not every system has all of these errors.
_CAUSE_OF = {
    number: cause for cause, names in _CAUSES.items() for name in names if (number := getattr(errno, name, None))
}
_REMEDIES = {
    Cause.PASSING: "try again; if it fails again, check the disk or the network",
    Cause.ROOM: "make room on its disk",
    Cause.QUOTA: "make room in the quota of its disk",
    Cause.SIZE: "raise the limit on the size of a file (ulimit -f), or use another disk",
    Cause.MEMORY: "free memory, or raise the limits on it (ulimit -v, vm.max_map_count)",
    Cause.RIGHTS: "grant write permission",
    Cause.READ_ONLY: "use another disk, or mount this one so that it can be written",
    Cause.NAME: "use a shorter path, with names that its file system takes",
    Cause.LINKS: "remove that link, or put what it leads to in its place",
    Cause.TAKEN: "choose another path, or move away what is there",
    Cause.DESCRIPTORS: "allow more open files (ulimit -n)",
    Cause.ABILITY: "use another file system",
    Cause.MISSING: "check the path and its folder",
    Cause.CLOSED: "start the command without closing it, or give it a file",
    Cause.OTHER: "check its folder and its disk",
}
# Of a file that cannot be read; what is not here says something about its content.
_READING_REMEDIES = {
    cause: _REMEDIES[cause]
    for cause in (Cause.PASSING, Cause.MEMORY, Cause.NAME, Cause.LINKS, Cause.DESCRIPTORS, Cause.ABILITY)
} | {Cause.RIGHTS: "grant read permission"}
_STORE_NUMBER = re.compile(r"\[[^\]]*os_error_code='(\d+)'")
_STORE_ANSWER = re.compile(r"([\w ]*?) ?\[HTTP code (\d+)\]")
# 408 Request Timeout, 425 Too Early, 429 Too Many Requests
_PASSING_ANSWERS = frozenset({408, 425, 429, *range(500, 600)})
_REFUSING_ANSWERS = frozenset({401, 403, 407})
_STORE_REMEDIES = {
    Cause.PASSING: "try again; if it fails again, check the server and the network",
    Cause.RIGHTS: "check the address, the keys and their permissions",
}
_STORE_PASSING = ("DEADLINE_EXCEEDED", "UNAVAILABLE", "retry attempts failed")


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


def error_text(error: BaseException) -> str:
    """Return what went wrong in words: the system's, such as "File too large", or the error's own, on one line."""
    return system_reason(error) or " ".join(str(error).split()) or type(error).__name__


def cause_of(error: BaseException) -> Cause | None:
    """Return what an error is caused by; None if it is neither of the system nor of a store that does not answer."""
    number = system_number(error)
    if number is not None:
        return _CAUSE_OF.get(number, Cause.OTHER)
    if isinstance(error, TimeoutError):
        return Cause.PASSING
    answer = _STORE_ANSWER.search(str(error))
    if answer is not None:
        code = int(answer[2])
        return Cause.PASSING if code in _PASSING_ANSWERS else Cause.RIGHTS if code in _REFUSING_ANSWERS else None
    return Cause.PASSING if any(words in str(error) for words in _STORE_PASSING) else None


def is_out_of_room(error: BaseException) -> bool:
    """Return whether a disk or a quota is full, or a file exceeds the limit on its size."""
    return cause_of(error) in (Cause.ROOM, Cause.QUOTA, Cause.SIZE)


def remedy_of(error: BaseException) -> str:
    """Return what to do about an error of the system, in the words of a command such as "make room on its disk"."""
    cause = cause_of(error) or Cause.OTHER
    if cause == Cause.CLOSED and getattr(error, "filename", None) != "<stdout>":
        cause = Cause.OTHER
    if cause == Cause.ROOM and _has_no_inode(getattr(error, "filename", None)):
        return "remove files from its disk, which has room but takes no more files (df -i)"
    return _STORE_REMEDIES.get(cause, _REMEDIES[cause]) if _is_of_store(error) else _REMEDIES[cause]


def _has_no_inode(path: object) -> bool:
    """Return whether the file system of a file that could not be created has used up its inodes."""
    if not isinstance(path, str | bytes):
        return False
    try:
        found = os.statvfs(os.path.dirname(path) or os.curdir)  # noqa: PTH120 - bytes, too
    except (OSError, ValueError):
        return False
    return found.f_files > 0 and found.f_favail == 0


def remedy_and_repeat(error: BaseException, repeat: str) -> str:
    """Return what to do about an error, and how to repeat what failed, such as "run the same command again"."""
    if cause_of(error) == Cause.PASSING:
        return f"{repeat}; if it fails again, check the disk or the network"
    return f"{remedy_of(error)}, then {repeat}"


def reading_remedy(error: BaseException, otherwise: str) -> str:
    """Return what to do about a file that cannot be read.

    Args:
        error: the error.
        otherwise: what to do if the fault is in the file: it is missing, too large, not a file, or has another content.
            It must not be advised after an error that passes, that lies in permissions, or in a limit of this machine.
    """
    cause = cause_of(error) or Cause.OTHER
    remedies = _READING_REMEDIES | _STORE_REMEDIES if _is_of_store(error) else _READING_REMEDIES
    return remedies.get(cause, otherwise)


def store_answer(error: BaseException) -> str | None:
    """Return what a store answered, such as "Service Unavailable, HTTP code 503", None if that is not in the error."""
    found = None if isinstance(error, OSError) else _STORE_ANSWER.search(str(error))
    return None if found is None else f"{found[1].strip() or 'an error'}, HTTP code {found[2]}"


def _is_of_store(error: BaseException) -> bool:
    """Return whether an error is a remote store's answer, not one of a file or of a time limit."""
    return not isinstance(error, OSError) and system_number(error) is None


def describe_system_error(error: OSError, path: str | os.PathLike[str] | None = None) -> str:
    """Return one line about an error: the file, the system's reason and the remedy.

    Args:
        error: the error; if it has no number, its own text is returned.
        path: the file, if the error does not name it.
    """
    if error.errno is None:
        return str(error)
    cause = cause_of(error)
    if cause == Cause.MISSING and not _has_working_folder():
        return "the current folder was removed: change to another folder (cd)"
    reason = system_reason(error)
    if error.filename is None and str(reason).startswith("No usable temporary directory"):
        return f"{reason}: make room there, or name a folder that can be written in $TMPDIR"
    # Whether it was to be read or written is not known here.
    remedy = "grant permission to it and its folders" if cause == Cause.RIGHTS else remedy_of(error)
    name = error.filename if error.filename is not None else path
    if name is None or isinstance(name, int):
        return f"a file cannot be read or written ({reason}): {remedy}"
    name = printable(os.fsdecode(name))
    if cause == Cause.MISSING:
        return f"{name} does not exist ({reason}): {remedy}"
    return f"{name} cannot be read or written ({reason}): {remedy}"


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


def status_of(path: str | os.PathLike[str], *, follow_symlinks: bool = True) -> os.stat_result | None:
    """Return the status of what a path leads to, or of a link itself, None if there is nothing.

    `Path.exists` takes any error for a no from Python 3.14 on, `os.path.exists` and `os.path.lexists` always did.

    Raises:
        OSError: the system cannot tell, such as ESTALE or EACCES.
    """
    try:
        return os.stat(path, follow_symlinks=follow_symlinks)  # noqa: PTH116 - making a Path takes twice the time of the call
    except OSError as error:
        if cause_of(error) in (Cause.MISSING, Cause.LINKS) or error.errno == errno.ENOTDIR:
            return None
        raise
    except ValueError:  # a NUL character
        return None


def _has_working_folder() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - Path.cwd is the same call
    except FileNotFoundError:
        return False
    return True
