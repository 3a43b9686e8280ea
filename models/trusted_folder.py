"""The folder of what is kept between starts, and whether nobody but this user and root can put code into such a folder.

Compiled programs and libraries are loaded from it. Owner and mode are checked from the folder up to the root of the
file system, because whoever can write to a folder above can replace what is below, and those of each file that would be
loaded. Imports nothing heavy.
"""

import os
import stat
from pathlib import Path

MOST_FILE_BYTES = 1 << 30
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
"""The largest file that is loaded: an endless one would fill the memory."""

_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ENTERED_BY_OTHERS = stat.S_IXGRP | stat.S_IXOTH
# Of Linux: the user IDs of this user namespace, and the one that stands for all that it does not map.
_USER_MAP, _UNMAPPED_USER = Path("/proc/self/uid_map"), Path("/proc/sys/fs/overflowuid")


def make_private_folder(folder: Path) -> None:
    """Create a folder and those above it that are missing, which only this user can enter.

    Raises:
        OSError: one cannot be created.
    """
    for each in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        each.mkdir(mode=0o700, exist_ok=True)


def folder_fault(folder: Path) -> str | None:
    """Return why code in a folder may be another user's, and after a colon what to do; None if it cannot be.

    Folders that do not exist are passed over.

    Raises:
        OSError: a folder cannot be looked at.
    """
    place = folder.absolute()
    for each in folders_above(place):
        try:
            status = each.stat()
        except FileNotFoundError:
            continue
        is_above = each not in (place, Path(os.path.realpath(place)))
        if not (_is_own(status) or (is_above and status.st_uid == _hidden_root())):
            return f"{each} belongs to user {status.st_uid}: give a folder of your own"
        # Where only the owner of an entry may rename it, folders above are as good as private.
        if _is_writable(status) and not (is_above and _is_passable(status)):
            return f"other users can write to {each}: chmod go-w {each}"
    return None


def file_fault(path: Path, folder: os.stat_result, *, most_bytes: int = MOST_FILE_BYTES) -> str | None:
    """Return why a file must not be loaded, and after a colon what to do; None if it may be.

    Args:
        path: the file, in a folder without a fault.
        folder: what `stat` says of that folder.
        most_bytes: the largest size.

    Raises:
        OSError: the file cannot be looked at.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is {_KINDS.get(stat.S_IFMT(status.st_mode), 'a device')}, not a file: remove it"
    if not _is_own(status):
        return f"{path} belongs to user {status.st_uid}: remove it"
    # Files are as private as the folder, if nobody else can enter it.
    if _is_writable(status) and folder.st_mode & _ENTERED_BY_OTHERS:
        return f"other users can write to {path}: chmod 700 {path.parent}"
    if status.st_size > most_bytes:
        return f"{path} is larger than {most_bytes:,} bytes: remove it"
    return None


def folders_above(place: Path) -> tuple[Path, ...]:
    """Return a folder and all above it, both as it is named, by an absolute path, and without links."""
    real = Path(os.path.realpath(place))
    return tuple(dict.fromkeys((place, *place.parents, real, *real.parents)))


def _is_own(status: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or status.st_uid in (0, os.geteuid())


def _hidden_root() -> int | None:
    """Return the user to whom the files of root seem to belong in a user namespace without root; None elsewhere.

    Unprivileged containers are such namespaces. Files of all other users seem to belong to the same one, and so it
    counts only for folders above that of the user.
    """
    try:
        outside = [(int(first), int(count)) for _, first, count in map(str.split, _USER_MAP.read_text().splitlines())]
        is_mapped = any(first <= 0 < first + count for first, count in outside)
        return None if is_mapped or not outside else int(_UNMAPPED_USER.read_text())
    except (OSError, ValueError):  # another system
        return None


def _is_writable(status: os.stat_result) -> bool:
    writers = status.st_mode & _FOR_OTHERS
    return bool(writers & stat.S_IWOTH or (writers and not _is_private_group(status.st_gid)))


def _is_passable(status: os.stat_result) -> bool:
    """Return whether a folder that others can write to may be above: it is sticky, or root lent it to a group."""
    return bool(status.st_mode & stat.S_ISVTX or (status.st_uid == 0 and not status.st_mode & stat.S_IWOTH))


def _is_private_group(number: int) -> bool:
    """Return whether a group is that of this user alone, as many systems make one for each user.

    That of root is not: some platforms give it to users of all numbers.
    """
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    is_users = number == user.pw_gid and group.gr_name == user.pw_name
    return number != 0 and is_users and set(group.gr_mem) <= {user.pw_name}


CACHE_REMEDY = "set XDG_CACHE_HOME to a folder that this user can write"


def user_cache_folder() -> Path | None:
    """Return the user's cache folder, $XDG_CACHE_HOME/loopfeed, else ~/.cache/loopfeed; None if there can be none.

    It need not exist yet. There is none without a home folder, as a container with an unknown user ID has it, or where
    this process could not create it. What is in a folder that exists can be used even if it cannot be written.
    """
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification ignores relative paths: they would point to a different folder in each working directory.
    if not cache_home.is_absolute():
        try:
            home = Path.home()
        except RuntimeError:  # neither $HOME nor an entry for the user ID
            return None
        if not home.is_absolute():
            return None
        cache_home = home / ".cache"
    folder = cache_home / "loopfeed"
    return folder if _can_be(folder) else None


def _can_be(folder: Path) -> bool:
    """Return whether a folder exists, or its nearest ancestor that does can be written."""
    for path in (folder, *folder.parents):
        if os.path.lexists(path):
            return path == folder or (path.is_dir() and os.access(path, os.W_OK | os.X_OK))
    return False
