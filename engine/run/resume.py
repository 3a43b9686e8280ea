"""The starting point of a resumed run: its recorded settings, its newest snapshot, and its logs up to that snapshot.

Does not depend on the loop or on how snapshots are written.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopfeed.engine.control.event import ControlEvent, factor_before
from loopfeed.engine.named_parts import NAME_FORM, OWN_PARTS, options_of, recorded_named_parts
from loopfeed.engine.records.control_log import CONTROL_LOG_NAME, ControlLogError, read_events
from loopfeed.engine.records.digests import RunningDigest
from loopfeed.engine.records.file_errors import name_file
from loopfeed.engine.records.folder_state import (
    by_result,
    by_snapshot,
    check_config_digest,
    check_no_more,
    digest_log,
    whole_lines_digest,
)
from loopfeed.engine.records.json_lines import read_lines
from loopfeed.engine.records.recorded_end import read_result
from loopfeed.engine.records.recorded_run import RecordedRun
from loopfeed.engine.records.run_folder import (
    CONFIG,
    EVALUATION_LOG,
    LOSS_LOG,
    RESULT,
    SNAPSHOTS,
    WEIGHTS,
    RunFolder,
)
from loopfeed.engine.run.data import RunData
from loopfeed.engine.run.parts import OWN_SOURCES, OwnParts, is_same_part
from loopfeed.engine.run.resolve import Resolved, recorded_own_parts
from loopfeed.preprocess.links import open_unlinked
from loopfeed.preprocess.quantities import listed, quantity
from loopfeed.preprocess.system_errors import reading_remedy

if TYPE_CHECKING:
    from loopfeed.engine.records.snapshot import Snapshot

# The key of the digest of the initial weights in the resolved part of `config.json`.
GIVEN_WEIGHTS = "init_from_sha256"
_OWN_PARTS = "own_parts"
_KEPT_PROPERTIES = (
    *("model", "num_classes", "height", "width", "mean", "std", "eval_manifest_sha256", "num_eval_batches"),
    *("labels", _OWN_PARTS),
)


def check_own(recorded: RecordedRun, run: Path, parts: OwnParts) -> None:
    """Raise ValueError if a run used a user-defined part that is not given now."""
    if missing := [name for name in recorded_own_parts(recorded.resolved) if getattr(parts, name, None) is None]:
        arguments = ", ".join(f"{name}=…" for name in missing)
        named = listed([OWN_PARTS[name].label for name in missing])
        if (options := options_of(recorded_named_parts(recorded.resolved), missing)) is not None:
            raise ValueError(f"{run} was trained with {named} of your own, which must be given again: {options}")
        raise ValueError(
            f"{run} was trained with {named} of your own, which must be given from Python: "
            f"loopfeed.train(dataclasses.replace(loopfeed.run_settings({str(run)!r}), resume=True), {arguments}); or "
            f"on the command line: {' '.join(f'--{name} {NAME_FORM}' for name in missing)}"
        )


def check_data(resolved: Resolved, recorded: RecordedRun) -> None:
    """Raise ValueError if the data or the model are not those of the recorded run."""
    check_manifest(resolved.data, recorded)
    now = json.loads(json.dumps(resolved.to_json()))
    for name in _KEPT_PROPERTIES:
        if now.get(name) != recorded.resolved.get(name) and not (
            name == _OWN_PARTS and _have_same_parts(recorded.resolved, now)
        ):
            raise ValueError(
                f"a resumed or replayed run must keep its {name}, which was {recorded.resolved.get(name)!r}, got "
                f"{now.get(name)!r}: use the data and the model that it started with"
            )


def _have_same_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two records have the same user-defined functions, by their names or else by their sources."""
    names, sources = (tuple(each.get(key, {}) for each in (before, now)) for key in (_OWN_PARTS, OWN_SOURCES))

    def is_same(part: str) -> bool:
        was, found = (each[part] for each in names)
        if was == found or (isinstance(was, str) and isinstance(found, str) and is_same_part(was, found)):
            return True
        digests = [each.get(part) for each in sources]
        return digests[0] is not None and digests[0] == digests[1]

    return names[0].keys() == names[1].keys() and all(map(is_same, names[0]))


def check_manifest(data: RunData, recorded: RecordedRun) -> None:
    """Raise ValueError if the training split is not that of the recorded run."""
    if data.manifest_digest != recorded.manifest_digest:
        raise ValueError(
            f"a resumed or replayed run must have its original data, but these differ: {data.description} (the "
            f"manifest's digest was {_short(recorded.manifest_digest)}, is now {_short(data.manifest_digest)}). "
            "Give the folder where the original data are now (--data), or start another run"
        )


def check_given_weights(digest: str | None, recorded: RecordedRun) -> None:
    """Raise ValueError if the initial weights are not those of the recorded run."""
    before = recorded.resolved.get(GIVEN_WEIGHTS)
    if digest is not None and digest != before:
        raise ValueError(
            "a run that is resumed or replayed from its beginning must start from its original weights, but those of "
            f"{recorded.config.init_from} differ (their digest was {_short(before)}, is now {_short(digest)}): "
            "restore the file, or start another run"
        )


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]


def describe_factor(start: "StartingPoint") -> str | None:
    """Return a message if a learning-rate factor that was requested earlier still applies, else None."""
    factor = factor_before(start.events, start.pulls)
    if factor == 1:
        return None
    return f"learning-rate factor {factor:g}, requested earlier, still applies (control-run --learning-rate-factor)"


@dataclass(frozen=True)
class StartingPoint:
    """The step and the state from which a launch begins.

    Attributes:
        step: updates done.
        pulls: batches taken.
        num_evaluations: evaluations completed.
        snapshot: the snapshot of that step, None for the state initialised from the seed.
        events: requests that took effect in the run so far.
    """

    step: int = 0
    pulls: int = 0
    num_evaluations: int = 0
    snapshot: "Snapshot | None" = None
    events: Sequence[ControlEvent] = ()


def find_start(run: Path, say: Callable[[str], None]) -> StartingPoint:
    """Return the starting point of a resumed run: its newest undamaged snapshot, or its beginning if it has none.

    Args:
        run: the run folder.
        say: called with a warning about each snapshot that is damaged.

    Raises:
        ValueError: if the log of requests cannot be read, if there are snapshots but none is readable, or if the disk
            failed while one was read.
    """
    from loopfeed.engine.records.snapshot import SnapshotError, UnreadSnapshotError, read_snapshot, snapshot_steps

    events = _read_events(run)
    saved_steps = snapshot_steps(run / SNAPSHOTS)
    for step in reversed(saved_steps):
        try:
            return start_at(read_snapshot(run / SNAPSHOTS, step), events)
        except UnreadSnapshotError as error:
            # Resuming from another one would remove this one, which may be sound, and the lines of its steps.
            remedy = reading_remedy(error.__cause__ or error, "check its disk and resume again")
            raise ValueError(f"{error}; {remedy}, or remove that snapshot to resume without it") from error
        except SnapshotError as error:
            if step == saved_steps[0]:
                # Starting again would discard the whole run, perhaps because of a temporary disk fault.
                raise ValueError(
                    f"no snapshot in {run / SNAPSHOTS} is readable ({error}): "
                    "restore one, or remove that folder to start the run again"
                ) from error
            say(f"warning: {error}; using the previous snapshot")
    return StartingPoint(events=events)


def _read_events(run: Path) -> Sequence[ControlEvent]:
    path = run / CONTROL_LOG_NAME
    try:
        return read_events(path)
    except ControlLogError as error:
        is_recorded = _is_control_log_recorded(run)
        remedy = "start another run (--run-dir)" if is_recorded else "remove it to resume without its requests"
        raise ControlLogError(f"{error}, or {remedy}") from error
    except OSError as error:
        raise ValueError(
            f"{path} must be a readable file, but is not ({error.strerror}): "
            f"{reading_remedy(error, 'restore that file')}"
        ) from error


def _is_control_log_recorded(run: Path) -> bool:
    """Return whether a snapshot or `result.json` records that the log of requests was not empty."""
    from loopfeed.engine.records.snapshot import read_folder_state, snapshot_steps

    end = read_result(run)
    states = [None if end is None else end.folder]
    for step in snapshot_steps(run / SNAPSHOTS):
        with suppress(ValueError, OSError):
            states.append(read_folder_state(run / SNAPSHOTS, step))
    return any(state is not None and state.logs[CONTROL_LOG_NAME].num_bytes for state in states)


def start_at(snapshot: "Snapshot", events: Sequence[ControlEvent]) -> StartingPoint:
    """Return the starting point of a launch that resumes from a snapshot; raise ValueError if it is not of a run."""
    counted = snapshot.leaves.get("num_evaluations")
    if counted is None or counted.shape or counted.dtype.kind != "i":
        raise ValueError(
            f"the snapshot of step {snapshot.step:,} must be that of a run, but does not count its evaluations: choose "
            "another run"
        )
    num_evaluations = int(counted)
    return StartingPoint(snapshot.step, snapshot.pulls, num_evaluations, snapshot, events)


def find_cuts(run: Path, start: StartingPoint) -> dict[Path, RunningDigest]:
    """Check the logs of a run against any recorded digests, and return the digest of each log up to the starting point.

    Each log is later cut to the number of bytes of its digest; the log of requests is kept whole.

    Raises:
        ValueError: if a line before the starting point is missing or unreadable, or was changed since it was written.
        OSError: if a file cannot be read.
    """
    result = read_result(run)
    known = start.snapshot.folder if start.snapshot is not None else None
    if known is not None:
        by = by_snapshot(run / SNAPSHOTS, start.step)
        cuts = {run / name: digest_log(run / name, (known.logs[name], by)) for name in (LOSS_LOG, EVALUATION_LOG)}
        digest_log(run / CONTROL_LOG_NAME, (known.logs[CONTROL_LOG_NAME], by))
    else:
        cuts = {
            run / LOSS_LOG: _digest_of_steps(run / LOSS_LOG, start.step),
            run / EVALUATION_LOG: _digest_of_lines(run / EVALUATION_LOG, start.num_evaluations),
        }
    if result is not None and result.folder is not None:
        for name, state in result.folder.logs.items():
            digest_log(run / name, (state, by_result(run / RESULT)))
        check_no_more(run / CONTROL_LOG_NAME, result.folder.logs[CONTROL_LOG_NAME], by_result(run / RESULT))
    return {**cuts, run / CONTROL_LOG_NAME: whole_lines_digest(run / CONTROL_LOG_NAME)}


def check_chain(run: Path, recorded: RecordedRun, start: StartingPoint) -> None:
    """Raise ValueError if `config.json` does not belong to the run that wrote the snapshot and the result."""
    if start.snapshot is not None and start.snapshot.folder is not None:
        by = f"the snapshot of step {start.step}"
        check_config_digest(run / CONFIG, recorded.digest, recorded.continued, start.snapshot.folder, by)
    result = read_result(run)
    if result is not None and result.folder is not None:
        # A launch removes the result of an earlier one, so this one belongs to the last launch.
        check_config_digest(run / CONFIG, recorded.digest, recorded.continued, result.folder, RESULT)
    if result is not None and result.weights_digest is not None and (run / WEIGHTS).exists():
        from loopfeed.engine.records.weights import read_weights

        if read_weights(run / WEIGHTS).digest != result.weights_digest:
            raise ValueError(
                f"{run / WEIGHTS} is not what the run wrote at its end: restore that file, or remove it (a resumed "
                "run writes it again)"
            )


def unchecked_notice(recorded: RecordedRun, start: StartingPoint) -> str | None:
    """Return a message if a run's files cannot be checked because an older version recorded no digests, else None."""
    if recorded.digest is not None and (start.snapshot is None or start.snapshot.folder is not None):
        return None
    which = "this run" if recorded.digest is None else "the snapshot"
    return f"{which} has no digests of its files, so changes to them cannot be detected"


def rewind_run(folder: RunFolder, start: StartingPoint, cuts: Mapping[Path, RunningDigest]) -> None:
    """Remove what was written after the starting point, because the resumed run will write it again.

    Args:
        folder: the run's folder.
        start: the starting point.
        cuts: the result of `find_cuts`.

    Raises:
        OSError: if a file cannot be cut or removed.
    """
    from loopfeed.engine.records.snapshot import remove_snapshot, snapshot_steps

    folder.remove_result()
    # Snapshots first: an unreadable one may become readable later, when its log lines are gone.
    for step in snapshot_steps(folder.snapshots):
        if step > start.step:
            remove_snapshot(folder.snapshots, step)
    for path, kept in cuts.items():
        try:
            if path.exists() and kept.num_bytes < path.stat().st_size:
                _cut(path, kept.num_bytes)
        except OSError as error:
            name_file(error, path)
            raise


def _cut(path: Path, num_bytes: int) -> None:
    file = open_unlinked(path, os.O_WRONLY)
    try:
        os.ftruncate(file, num_bytes)
    finally:
        os.close(file)


def _digest_of_steps(path: Path, num_steps: int) -> RunningDigest:
    """Return the digest of the first `num_steps` lines of a loss log; raise ValueError if line n is not for step n."""
    found = RunningDigest()
    for number, line in enumerate(_lines(path, num_steps), start=1):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError, RecursionError):
            step = None
        if step != number:
            raise ValueError(
                f"{path} must have step {number} in line {number}, but has {line[:80]!r}: restore that file"
            )
        found.update(line)
    return found


def _digest_of_lines(path: Path, num_lines: int) -> RunningDigest:
    found = RunningDigest()
    for line in _lines(path, num_lines):
        found.update(line)
    return found


def _lines(path: Path, count: int) -> Iterator[bytes]:
    """Yield the first `count` complete lines of a file without loading the whole file, because a log may be large."""
    found = 0
    for line in islice(read_lines(path), count):
        found += 1
        yield line
    if found < count:
        raise ValueError(
            f"{path} must have the {quantity(count, 'line')} written before the newest snapshot, but has "
            f"{found:,}: restore that file"
        )
