"""The folder of a run without --run-dir."""

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def run_dir_of(named: str | None) -> Iterator[str]:
    """Yield the named folder, or create one named after the time; remove a created one that stays empty."""
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
    """Create a folder under runs/; runs that start in the same second get different ones."""
    stem = time.strftime("%Y%m%d-%H%M%S")
    Path("runs").mkdir(exist_ok=True)
    for number in itertools.count(1):
        path = Path("runs", stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError
