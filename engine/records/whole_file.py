"""Files that are written whole or not at all."""

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from engine.records.file_errors import name_file


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that a reader, or a crash at any instant, sees the old content or the new, never a part.

    The file's permissions follow the umask, as for any other new file.

    Raises:
        OSError: where it cannot be written, which names `path`; the old file, if any, is as it was.
    """
    try:
        _write_beside(path, content)
    except OSError as error:
        name_file(error, path)
        raise
    _sync_folder(path.parent)


def _write_beside(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    # Not tempfile.mkstemp: it makes files private to their owner, and to undo that one would need the umask, which can
    # be read only by setting it, for all threads.
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


def remove_unfinished(path: Path) -> None:
    """Removes what a process that was killed in `write_whole` left beside a file, which nobody may be writing now.

    Raises:
        OSError: where the folder cannot be listed, or a file in it not be removed.
    """
    for entry in list(path.parent.iterdir()):
        if re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}", entry.name):
            entry.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Makes the new name last through a power cut; the file is whole without it, so that a refusal is no failure."""
    # Some network file systems refuse to sync a folder.
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
