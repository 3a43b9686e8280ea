"""Files that are written whole or not at all."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that a reader, or a crash at any instant, sees the old content or the new, never a part.

    Raises:
        OSError: where it cannot be written; the old file, if any, is as it was.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private to their owner; a run folder is read by others like any other output.
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    # The only portable way to read it is to set it; a file made by another thread in between would be private.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
