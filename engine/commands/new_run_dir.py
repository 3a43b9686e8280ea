"""The folder that a run gets where none was named."""

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def run_dir_of(named: str | None) -> Iterator[str]:
    """Gives the folder that was named, or makes a new one called by the time; one that stays empty is removed."""
    if named is not None:
        yield named
        return
    is_first = not Path("runs").exists()
    made = _make_run_dir()
    try:
        yield os.fspath(made)
    finally:
        with suppress(OSError):
            made.rmdir()
            if is_first:
                made.parent.rmdir()


def _make_run_dir() -> Path:
    """Makes a folder under runs/; runs that start in the same second get different ones."""
    stem = time.strftime("%Y%m%d-%H%M%S")
    Path("runs").mkdir(exist_ok=True)
    for number in itertools.count(1):
        path = Path("runs", stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError
