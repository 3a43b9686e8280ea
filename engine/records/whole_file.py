"""Writes files atomically, that is, whole or not at all."""

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from loopfeed.engine.records.file_errors import name_file
from loopfeed.preprocess.synced_folders import make_folders, sync_folder


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: even after a crash, readers see either all of the old content or all of the new.

    The file's permissions follow the umask, as for any other new file.

    Raises:
        OSError: if it cannot be written; the message names `path`. An old file is then unchanged, unless only the sync
            of its folder failed.
    """
    try:
        _write_beside(path, content)
        with suppress(PermissionError):  # a folder that may not be listed cannot be opened, and so not be synced
            sync_folder(path.parent)
    except OSError as error:
        name_file(error, path)
        raise


def check_can_write(path: Path, name: str, *, overwrite: bool) -> None:
    """Raise ValueError if a file, called `name` in messages, must not or cannot be written at `path`."""
    if not path.parent.is_dir():
        found, remedy = ("a file", "choose another path") if path.parent.exists() else ("missing", "create it")
        raise ValueError(f"{name} must be in an existing folder, but {path.parent} is {found}: {remedy}")
    if path.is_dir():
        raise ValueError(f"{name} must be a file, but {path} is a folder: choose another path")
    if os.path.lexists(path) and not path.is_file():
        raise ValueError(f"{name} must be a regular file, but {path} is not: choose another path")
    if path.exists() and not overwrite:
        raise ValueError(
            f"{name} must be a new file, but {path} exists: choose another path, or replace it (--overwrite)"
        )


def _write_beside(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    # Not tempfile.mkstemp: it makes files private to their owner, and undoing that needs the umask, which can
    # only be read by setting it, for all threads.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """Create a folder and its parents unless it exists; raise OSError, which names `path`, if that is impossible."""
    try:
        make_folders(path)
    except OSError as error:
        name_file(error, path)
        raise


def remove_unfinished(path: Path) -> None:
    """Remove temporary files of processes killed in `write_whole(path, …)`; no process may be writing `path`.

    Raises:
        OSError: if the folder cannot be listed or a file cannot be removed.
    """
    for entry in list(path.parent.iterdir()):
        if re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}", entry.name):
            entry.unlink(missing_ok=True)
