"""The search for run folders below a folder, in bounded time. Must not know: what a run folder says."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from loopfeed.engine.records.run_summary import is_run
from loopfeed.preprocess.system_entries import is_hidden

MOST_DEPTH = 8
MOST_ENTRIES = 500_000
_PACK_MARK = "zarr.json"


def find_runs(folder: Path, notify: Callable[[str], None]) -> Iterator[Path]:
    """Yield the run folders at or below a folder; a run folder, a pack and a hidden folder are not searched further.

    At most `MOST_DEPTH` levels and `MOST_ENTRIES` files and folders are looked at. Links to folders are followed after
    all else, each folder once, so that a run has the name of a link only if it has no other here.

    Args:
        folder: where to search.
        notify: called with a line of text about what could not be searched.

    Raises:
        OSError: `folder` itself cannot be read.
    """
    seen: set[tuple[int, int]] = set()
    num_entries, is_too_deep = 0, False
    waiting, links = [(folder, 0)], list[tuple[Path, int]]()
    while waiting or links:
        here, depth = waiting.pop() if waiting else links.pop()
        try:
            status = here.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            if is_run(here):
                yield here
                continue
            names, below = _entries(here, MOST_ENTRIES - num_entries)
            below = [path for path in below if not _leads_above(path, folder)]
        except OSError as error:
            if here == folder:
                raise
            notify(f"{here} cannot be searched: {error.strerror}")
            continue
        num_entries += names
        if num_entries >= MOST_ENTRIES:
            notify(
                f"the search stopped in {here}, after {MOST_ENTRIES:,} files and folders: give a folder closer to the "
                "runs"
            )
            return
        if below and depth == MOST_DEPTH:
            is_too_deep = True
            continue
        for path in reversed(below):
            (links if path.is_symlink() else waiting).append((path, depth + 1))
    if is_too_deep:
        notify(f"folders more than {MOST_DEPTH} levels below {folder} were not searched: give a folder closer to them")


def _entries(folder: Path, most: int) -> tuple[int, list[Path]]:
    """Return how many entries of a folder were looked at, at most `most`, and the folders to search among them."""
    below, count = [], 0
    with os.scandir(folder) as entries:
        for entry in entries:
            count += 1
            if count >= most:
                break
            if entry.name == _PACK_MARK:
                return count, []
            if not is_hidden(entry.name) and entry.is_dir():
                below.append(folder / entry.name)
    return count, sorted(below)


def _leads_above(path: Path, folder: Path) -> bool:
    """Return whether a path is a link to the folder that is searched, or to one above it."""
    return path.is_symlink() and folder.resolve().is_relative_to(path.resolve())
