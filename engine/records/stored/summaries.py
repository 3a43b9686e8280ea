"""What is known of the runs that are stored below a URL, by their logs; of each log only the end is read."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from engine.records.run_folder import CONFIG, EVALUATION_LOG, LOSS_LOG, RESULT, RUNTIME
from engine.records.run_summary import RunSummary, summarise_run
from engine.records.stored.reading import GoneError, check_room, read_parts
from engine.records.stored.state import MARKER, Part, StoredRunError, StoredState, read_state
from preprocess.shards.location import Location, open_location

_READ = (CONFIG, RESULT, EVALUATION_LOG, LOSS_LOG, RUNTIME)
_TRIES = 5


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
    for _ in range(_TRIES):
        with tempfile.TemporaryDirectory(prefix="feedloop-") as temporary, suppress(GoneError):
            try:
                state = read_state(run)
                if state is None:
                    return RunSummary(name, "damaged", fault="it was removed while it was read")
                _copy_ends(run, state, Path(temporary))
            except StoredRunError as error:  # not the store, but what it contains
                return RunSummary(name, "damaged", fault=str(error))
            return summarise_run(Path(temporary), now_s, name)
    return RunSummary(name, "damaged", fault=f"it lacks objects although its {MARKER} lists them")


def _copy_ends(run: Location, state: StoredState, folder: Path) -> None:
    """Copy what a summary needs, with the time of the upload, to an empty folder."""
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
