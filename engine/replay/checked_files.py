"""Checks all files of a run against the digests that the run recorded.

Only reads, without taking the run's lock. Detects damage and edits by hand, but does not protect against recomputed
digests.
"""

import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
from loopfeed.engine.records.recorded_end import RecordedEnd, read_result
from loopfeed.engine.records.recorded_run import RecordedRun, read_recorded
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
    return _Check(run, read).check()


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


class _Check:
    def __init__(self, run: Path, read: Sequence[Snapshot]) -> None:
        self._run = run
        self._read = {snapshot.step: snapshot for snapshot in read}
        self._faults: dict[str, str] = {}
        self._checked: set[str] = set()
        self._unchecked: list[str] = []

    def check(self) -> CheckedFiles:
        """Check every file, and return the result."""
        recorded = self._read_file(CONFIG, partial(read_recorded, self._run))
        end = self._read_file(RESULT, partial(read_result, self._run)) if (self._run / RESULT).exists() else None
        states = self._snapshot_states()
        if end is not None and end.folder is not None:
            states.append((end.folder, RecordedBy(RESULT)))
        self._check_config(recorded, states)
        for name in _LOGS:
            self._check_log(name, [(state.logs[name], by) for state, by in states if name in state.logs])
        if end is not None and end.folder is not None and not self._is_going():
            for name, log in end.folder.logs.items():
                self._read_file(name, partial(check_no_more, self._run / name, log, RecordedBy(RESULT)))
        self._check_weights(end)
        self._list_unchecked(recorded, end)
        return CheckedFiles(len(self._checked), tuple(self._faults.values()), tuple(self._unchecked))

    def _read_file[Found](self, name: str, read: Callable[[], Found]) -> Found | None:
        """Call `read` for a file unless the file has a known fault; if `read` raises, record the error as a fault."""
        if name in self._faults:
            return None
        try:
            found = read()
        except (ValueError, OSError) as error:
            self._faults[name] = str(error)
            return None
        self._checked.add(name)
        return found

    def _is_going(self) -> bool:
        with suppress(OSError):
            return is_locked(self._run)
        return False

    def _snapshot_states(self) -> list[tuple[FolderState, RecordedBy]]:
        folder, states = self._run / SNAPSHOTS, []
        for step in snapshot_steps(folder):
            name = f"{SNAPSHOTS}/{step}"
            snapshot = self._read_file(name, partial(self._snapshot, step))
            if snapshot is not None and snapshot.folder is not None:
                states.append((snapshot.folder, RecordedBy(f"the snapshot of step {step}")))
            elif snapshot is None and not (folder / str(step)).exists():
                del self._faults[name]  # a running training has removed it meanwhile
        return states

    def _snapshot(self, step: int) -> Snapshot:
        return self._read.get(step) or read_snapshot(self._run / SNAPSHOTS, step)

    def _check_config(self, recorded: RecordedRun | None, states: Sequence[tuple[FolderState, RecordedBy]]) -> None:
        if recorded is not None:
            path = self._run / CONFIG
            for state, by in states:
                self._read_file(
                    CONFIG,
                    partial(check_config_digest, path, recorded.digest, recorded.continued, state, by.name),
                )

    def _check_log(self, name: str, expected: Sequence[tuple[LogState, RecordedBy]]) -> None:
        if expected:
            self._read_file(name, partial(digest_log, self._run / name, *expected))
        elif name == CONTROL_LOG_NAME:
            self._read_file(name, partial(read_events, self._run / name))
            self._checked.discard(name)

    def _check_weights(self, end: RecordedEnd | None) -> None:
        path = self._run / WEIGHTS
        expected = None if end is None else end.weights_digest
        if not path.exists() and not path.is_symlink():
            if expected is not None:
                self._faults[WEIGHTS] = f"{path} is missing, although {RESULT} records its digest: restore that file"
            return
        weights = self._read_file(WEIGHTS, partial(read_weights, path))
        if weights is None:
            return
        if expected not in (None, weights.digest):
            self._faults[WEIGHTS] = f"{path} is not what the run wrote at its end: restore that file"
        elif weights.digest is None:
            self._checked.discard(WEIGHTS)
            self._unchecked.append(WEIGHTS)

    def _list_unchecked(self, recorded: RecordedRun | None, end: RecordedEnd | None) -> None:
        """Move files not covered by any digest from the set of checked files to the list of unchecked files."""
        if recorded is not None and recorded.digest is None:
            self._checked.discard(CONFIG)
            self._unchecked.append(CONFIG)
        if end is not None and not end.is_sealed:
            self._checked.discard(RESULT)
            self._unchecked.append(RESULT)
        for name in _LOGS:
            if (self._run / name).exists() and name not in self._checked and name not in self._faults:
                self._unchecked.append(name)
        self._checked -= self._faults.keys()
        self._checked = {name for name in self._checked if (self._run / name).exists()}
