"""What is known of the runs that are stored below a URL, by their logs; of each log only the end is read."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from loopfeed.engine.records.run_folder import CONFIG, EVALUATION_LOG, LOSS_LOG, RESULT, RUNTIME
from loopfeed.engine.records.run_summary import RunSummary, summarise_run
from loopfeed.engine.records.stored.reading import check_room, read_parts, read_whole
from loopfeed.engine.records.stored.state import MARKER, Part, StoredRunError, StoredState
from loopfeed.preprocess.shards.location import Location, open_location

_READ = (CONFIG, RESULT, EVALUATION_LOG, LOSS_LOG, RUNTIME)


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
