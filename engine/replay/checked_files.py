"""Checks all files of a run against the digests that the run recorded.

Only reads, without taking the run's lock. Detects damage and edits by hand, but does not protect against recomputed
digests.
"""

import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loopfeed.engine.records.control_log import CONTROL_LOG_NAME, read_events
from loopfeed.engine.records.digests import LogState
from loopfeed.engine.records.folder_lock import is_locked
from loopfeed.engine.records.folder_state import (
    FolderState,
    RecordedBy,
    check_config_digest,
    check_no_more,
    digest_log,
)
from loopfeed.engine.records.recorded_run import read_recorded, read_result
from loopfeed.engine.records.run_folder import CONFIG, EVALUATION_LOG, LOSS_LOG, RESULT, SNAPSHOTS, WEIGHTS
from loopfeed.engine.records.snapshot import Snapshot, read_snapshot, snapshot_steps
from loopfeed.engine.records.weights import read_weights

_LOGS = (LOSS_LOG, EVALUATION_LOG, CONTROL_LOG_NAME)


@dataclass(frozen=True)
class CheckedFiles:
    """The result of checking the files of a run.

    Attributes:
        num_checked: the number of files whose content matches its digest; a snapshot counts as one.
        faults: one line for each faulty file.
        unchecked: names of files that no digest covers (yet).
    """

    num_checked: int
    faults: tuple[str, ...]
    unchecked: tuple[str, ...]


def check_files(run: Path, read: Sequence[Snapshot] = ()) -> CheckedFiles:
    """Check every file of a run against its recorded digest.

    Args:
        run: the folder of the run.
        read: snapshots of the run that were just read and found whole; they are not read again.

    Raises:
        OSError: if the folder cannot be listed.
    """
    found = _Found()
    was_going = _is_going(run)
    recorded = found.read(CONFIG, read_recorded, run)
    end = found.read(RESULT, read_result, run) if (run / RESULT).exists() else None
    states = _snapshot_states(run / SNAPSHOTS, {snapshot.step: snapshot for snapshot in read}, found)
    ended = None if end is None else end.folder
    if ended is not None:
        states.append((ended, RecordedBy(RESULT)))
    if recorded is not None:
        for state, by in states:
            found.read(CONFIG, check_config_digest, run / CONFIG, recorded.digest, recorded.continued, state, by.name)
    no_digest = {
        CONFIG: recorded is not None and recorded.digest is None,
        RESULT: end is not None and not end.is_sealed,
    }
    for name in _LOGS:
        expected = [(state.logs[name], by) for state, by in states if name in state.logs]
        no_digest[name] = not expected
        if expected:
            found.read(name, digest_log, run / name, *expected)
        elif name == CONTROL_LOG_NAME:
            found.read(name, read_events, run / name)
        # A launch writes again after the end of the one before it; also one that began or ended while this reads.
        if ended is not None and name in ended.logs and not was_going:
            found.read(name, _check_no_more, run, name, ended.logs[name])
    no_digest[WEIGHTS] = not _check_weights(run / WEIGHTS, None if end is None else end.weights_digest, found)
    there = {name for name in (*no_digest, *found.whole) if name not in found.faults and (run / name).exists()}
    unchecked = [name for name in (WEIGHTS, CONFIG, RESULT, *_LOGS) if name in there and no_digest[name]]
    return CheckedFiles(len(there.difference(unchecked)), tuple(found.faults.values()), tuple(unchecked))


def describe_check(run: Path, read: Sequence[Snapshot] = ()) -> str:
    """Return a message that states what `check_files` will read, and how large the snapshots are."""
    steps = set(snapshot_steps(run / SNAPSHOTS)) - {snapshot.step for snapshot in read}
    sizes = (_size(entry) for step in steps for entry in (run / SNAPSHOTS / str(step)).rglob("*"))
    snapshots = f"{len(steps)} further snapshot{'s' * (len(steps) > 1)}"
    return f"checking the files of {run}" + (f" and {snapshots} ({sum(sizes) / 1e6:,.1f} MB)" if steps else "")


def _size(path: Path) -> int:
    """Return the size of a regular file, or 0 for anything else, including a file that a run has just removed."""
    with suppress(OSError):
        status = path.lstat()
        return status.st_size if stat.S_ISREG(status.st_mode) else 0
    return 0


class _Found:
    """What was found of the files so far: the whole ones, and the faults of the others by name."""

    def __init__(self) -> None:
        self.whole: set[str] = set()
        self.faults: dict[str, str] = {}

    def read[**Arguments, Read](
        self, name: str, read: Callable[Arguments, Read], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Read | None:
        """Read a file unless it has a known fault; if that raises, keep the error as its fault."""
        if name in self.faults:
            return None
        try:
            found = read(*args, **kwargs)
        except (ValueError, OSError) as error:
            self.faults[name] = str(error)
            return None
        self.whole.add(name)
        return found


def _check_no_more(run: Path, name: str, expected: LogState) -> None:
    try:
        check_no_more(run / name, expected, RecordedBy(RESULT))
    except ValueError:
        if not _is_going(run):
            raise


def _is_going(run: Path) -> bool:
    with suppress(OSError):
        return is_locked(run)
    return False


def _snapshot_states(folder: Path, read: Mapping[int, Snapshot], found: _Found) -> list[tuple[FolderState, RecordedBy]]:
    """Read the snapshots of a run but those that were read; return what each says of the folder."""
    states = []
    for step in snapshot_steps(folder):
        name = f"{SNAPSHOTS}/{step}"
        if step in read:
            found.whole.add(name)
        snapshot = read[step] if step in read else found.read(name, read_snapshot, folder, step)
        if snapshot is not None and snapshot.folder is not None:
            states.append((snapshot.folder, RecordedBy(f"the snapshot of step {step}")))
        elif snapshot is None and not (folder / str(step)).exists():
            del found.faults[name]  # a running training has removed it meanwhile
    return states


def _check_weights(path: Path, expected: str | None, found: _Found) -> bool:
    """Check the weights of a run; return whether they have a digest."""
    if not path.exists() and not path.is_symlink():
        if expected is not None:
            found.faults[WEIGHTS] = f"{path} is missing, although {RESULT} records its digest: restore that file"
        return False
    weights = found.read(WEIGHTS, read_weights, path)
    if weights is not None and expected not in (None, weights.digest):
        found.faults[WEIGHTS] = f"{path} is not what the run wrote at its end: restore that file"
    return weights is not None and weights.digest is not None
