"""The default folder of a run that is started without --run-dir."""

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def run_dir_of(named: str | None) -> Iterator[str]:
    """Yield the given folder or, if there is none, a new one named after the current time.

    A new folder is removed at the end of the block if it is still empty.
    """
    if named is not None:
        yield named
        return
    is_first = not Path("runs").exists()
    created = _make_run_dir()
    try:
        yield os.fspath(created)
    finally:
        with suppress(OSError):
            created.rmdir()
            if is_first:
                created.parent.rmdir()


def _make_run_dir() -> Path:
    """Create a folder under runs/, with a number appended if another run started in the same second."""
    stem = time.strftime("%Y%m%d-%H%M%S")
    Path("runs").mkdir(exist_ok=True)
    for number in itertools.count(1):
        path = Path("runs", stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError
