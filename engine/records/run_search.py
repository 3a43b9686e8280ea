"""The search for runs below a folder, in bounded time, and below a URL, with a summary of each stored run."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from loopfeed.engine.records.run_folder import CONFIG, EVALUATION_LOG, LOSS_LOG, RESULT, RUNTIME
from loopfeed.engine.records.run_summary import RunSummary, is_run, summarise_run
from loopfeed.engine.records.stored.reading import check_room, read_parts, read_whole
from loopfeed.engine.records.stored.state import MARKER, Part, StoredRunError, StoredState
from loopfeed.preprocess.shards.location import Location, open_location
from loopfeed.preprocess.system_entries import is_hidden

_READ = (CONFIG, RESULT, EVALUATION_LOG, LOSS_LOG, RUNTIME)

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
            # Without links to the folder that is searched, or to one above it.
            here_or_above = folder.resolve().is_relative_to
            below = [path for path in below if not (path.is_symlink() and here_or_above(path.resolve()))]
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


def summarise_stored_runs(url: str, now_s: float, storage_options: Mapping[str, str]) -> Iterator[RunSummary]:
    """Yield what is known of each run at or below a URL.

    Args:
        url: of one run, or of what several have in common.
        now_s: the current time, in seconds since the Unix epoch.
        storage_options: how to reach the store.

    Raises:
        ShardError: the store cannot be reached.
    """
    location = open_location(url, storage_options=storage_options)
    for key in location.list_keys():
        if key != MARKER and not key.endswith(f"/{MARKER}"):
            continue
        name = key.removesuffix(MARKER).rstrip("/")
        run = location.child(name) if name else location
        yield _summarise(run, now_s)


def _summarise(run: Location, now_s: float) -> RunSummary:
    name = run.display.rstrip("/")
    with tempfile.TemporaryDirectory(prefix="loopfeed-") as temporary:
        try:
            found = read_whole(run, partial(_copy_ends, run, Path(temporary)))
        except StoredRunError as error:  # not the store, but what it contains
            return RunSummary(name, "damaged", fault=str(error))
        if found is None:
            return RunSummary(name, "damaged", fault="it was removed while it was read")
        return summarise_run(found, now_s, name)


def _copy_ends(run: Location, place: Path, state: StoredState) -> Path:
    """Copy what a summary needs, with the time of the upload, to a new folder in `place`; return that."""
    folder = Path(tempfile.mkdtemp(dir=place))
    check_room(run, folder, state, [name for name in _READ if name in state.files and name != LOSS_LOG])
    for name in _READ:
        if name in state.files:
            parts: Sequence[Part] = state.files[name]
            # A line may be divided between two objects.
            wanted = parts[-2:] if name == LOSS_LOG else parts
            with (folder / name).open("wb") as file:
                file.writelines(read_parts(run, wanted))
            os.utime(folder / name, (state.time, state.time))
    os.utime(folder, (state.time, state.time))
    return folder
