"""The resume of a run: its recorded settings, its newest snapshot, and its logs up to that snapshot, each read once.

Does not depend on the loop or on how snapshots are written.

A new run begins with a state drawn from the seed, with the weights that the user gives put into it.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from loopfeed.engine.config import SETTINGS, TrainConfig
from loopfeed.engine.control.request import ControlEvent, factor_before
from loopfeed.engine.data.dataset import DATA_LOCATION, data_of_record
from loopfeed.engine.named_parts import compare_named
from loopfeed.engine.parts import UserParts, changed_sources
from loopfeed.engine.program.kernels import AUTO
from loopfeed.engine.program.train_state import TrainModel, TrainState, init_state
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
from loopfeed.engine.records.recorded_run import RecordedEnd, RecordedRun, read_recorded, read_result
from loopfeed.engine.records.run_folder import (
    CONFIG,
    EVALUATION_LOG,
    LOSS_LOG,
    RESULT,
    SNAPSHOTS,
    WEIGHTS,
    RunFolder,
)
from loopfeed.engine.run.changes import check_settings, check_user
from loopfeed.engine.updates.settings import CompiledSettings
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.regular_file import open_unlinked
from loopfeed.preprocess.system_errors import reading_remedy

if TYPE_CHECKING:
    from loopfeed.engine.records.snapshot import Snapshot


def describe_factor(start: "Resume") -> str | None:
    """Return a message if a learning-rate factor that was requested earlier still applies, else None."""
    factor = factor_before(start.events, start.batch_index)
    if factor == 1:
        return None
    return f"learning-rate factor {factor:g}, requested earlier, still applies (control-run --learning-rate-factor)"


@dataclass(frozen=True)
class Resume:
    """Where a launch begins, and what its run recorded before; a new run resumes nothing.

    Attributes:
        step: updates done.
        batch_index: batches taken.
        num_evaluations: evaluations completed.
        snapshot: the snapshot of that step, None for the state initialised from the seed.
        events: requests that took effect in the run so far.
        recorded: the record of the run, None for a new run.
        end: how its last launch ended, None if that is not recorded.
    """

    step: int = 0
    batch_index: int = 0
    num_evaluations: int = 0
    snapshot: "Snapshot | None" = None
    events: Sequence[ControlEvent] = ()
    recorded: RecordedRun | None = None
    end: RecordedEnd | None = None


def resume_run(
    config: TrainConfig, run: Path, parts: UserParts, notify: Callable[[str], None]
) -> tuple[TrainConfig, Resume]:
    """Read where a run goes on; return the settings, with what they leave to the record, and the starting point.

    A resumed run keeps its kernels and the metric by which it stops, unless the settings name others, which is refused.

    Args:
        config: the settings of the launch.
        run: the run folder.
        parts: the user-defined parts.
        notify: called with lines of text about the record.

    Raises:
        ValueError: the settings or parts are not those of the run, or as `find_start` and `check_chain`.
    """
    recorded = read_recorded(run)
    if parts.batches is None and not config.synthetic:
        place = data_of_record(config.data, recorded.resolved.get(DATA_LOCATION))
        if config.data is None:
            recorded = replace(recorded, config=replace(recorded.config, data=place))
        config = replace(config, data=place)
    if config.kernels == AUTO:
        config = replace(config, kernels=recorded.config.kernels)
    if config.stop_metric is None:
        config = replace(config, stop_metric=recorded.config.stop_metric)
    check_user(recorded, run, parts)
    for warning in compare_named(recorded.resolved, parts.named):
        notify(warning)
    check_settings(config, recorded.config)
    if (line := recorded.describe_replaced(config, options=SETTINGS)) is not None:
        notify(line)
    start = find_start(run, notify, recorded)
    check_chain(run, start)
    where = f"the snapshot of step {start.step:,}" if start.snapshot else "its beginning, because it has no snapshot"
    notify(f"resuming {run} from {where}")
    for warning in changed_sources(recorded.resolved, parts):
        notify(warning)
    return config, start


def find_start(run: Path, say: Callable[[str], None], recorded: RecordedRun | None = None) -> Resume:
    """Return the starting point of a resumed run: its newest undamaged snapshot, or its beginning if it has none.

    Args:
        run: the run folder.
        say: called with a warning about each snapshot that is damaged.
        recorded: the record of the run.

    Raises:
        ValueError: if `result.json` or the log of requests cannot be read, if there are snapshots but none is readable,
            or if the disk failed while one was read.
    """
    from loopfeed.engine.records.snapshot import SnapshotError, UnreadSnapshotError, read_snapshot, snapshot_steps

    end = read_result(run)
    begin = Resume(events=_read_events(run, end), recorded=recorded, end=end)
    saved_steps = snapshot_steps(run / SNAPSHOTS)
    for step in reversed(saved_steps):
        try:
            return start_at(read_snapshot(run / SNAPSHOTS, step), begin)
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
    return begin


def _read_events(run: Path, end: RecordedEnd | None) -> Sequence[ControlEvent]:
    path = run / CONTROL_LOG_NAME
    try:
        return read_events(path)
    except ControlLogError as error:
        is_recorded = _is_control_log_recorded(run, end)
        remedy = "train the run again with --overwrite" if is_recorded else "remove it to resume without its requests"
        raise ControlLogError(f"{error}, or {remedy}") from error
    except OSError as error:
        raise ValueError(
            f"{path} must be a readable file, but is not ({error.strerror}): "
            f"{reading_remedy(error, 'restore that file')}"
        ) from error


def _is_control_log_recorded(run: Path, end: RecordedEnd | None) -> bool:
    """Return whether a snapshot or `result.json` records that the log of requests was not empty."""
    from loopfeed.engine.records.snapshot import read_folder_state, snapshot_steps

    states = [None if end is None else end.folder]
    for step in snapshot_steps(run / SNAPSHOTS):
        with suppress(ValueError, OSError):
            states.append(read_folder_state(run / SNAPSHOTS, step))
    return any(state is not None and state.logs[CONTROL_LOG_NAME].num_bytes for state in states)


def start_at(snapshot: "Snapshot", begin: Resume) -> Resume:
    """Return `begin` with the step and the state of a snapshot; raise ValueError if that is not of a run."""
    counted = snapshot.leaves.get("num_evaluations")
    if counted is None or counted.shape or counted.dtype.kind != "i":
        raise ValueError(
            f"the snapshot of step {snapshot.step:,} must be that of a run, but does not count its evaluations: train "
            "the run again with --overwrite"
        )
    return replace(
        begin, step=snapshot.step, batch_index=snapshot.batch_index, num_evaluations=int(counted), snapshot=snapshot
    )


def find_cuts(run: Path, start: Resume) -> dict[Path, RunningDigest]:
    """Check the logs of a run against any recorded digests, and return the digest of each log up to the starting point.

    Each log is later cut to the number of bytes of its digest; the log of requests is kept whole.

    Raises:
        ValueError: if a line before the starting point is missing or unreadable, or was changed since it was written.
        OSError: if a file cannot be read.
    """
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
    if start.end is not None and start.end.folder is not None:
        logs = start.end.folder.logs
        for name, state in logs.items():
            digest_log(run / name, (state, by_result(run / RESULT)))
        check_no_more(run / CONTROL_LOG_NAME, logs[CONTROL_LOG_NAME], by_result(run / RESULT))
    return {**cuts, run / CONTROL_LOG_NAME: whole_lines_digest(run / CONTROL_LOG_NAME)}


def check_chain(run: Path, start: Resume) -> None:
    """Raise ValueError if `config.json` does not belong to the run that wrote the snapshot and the result."""
    recorded, result = start.recorded, start.end
    assert recorded is not None
    if start.snapshot is not None and start.snapshot.folder is not None:
        by = run / SNAPSHOTS / str(start.step)
        check_config_digest(run / CONFIG, recorded.digest, recorded.continued, start.snapshot.folder, by)
    if result is not None and result.folder is not None:
        # A launch removes the result of an earlier one, so this one belongs to the last launch.
        check_config_digest(run / CONFIG, recorded.digest, recorded.continued, result.folder, run / RESULT)
    if result is not None and result.weights_digest is not None and (run / WEIGHTS).exists():
        from loopfeed.engine.records.weights import read_weights

        if read_weights(run / WEIGHTS).digest != result.weights_digest:
            raise ValueError(
                f"{run / WEIGHTS} is not what the run wrote at its end: restore that file, or remove it (a resumed "
                "run writes it again)"
            )


def unchecked_notice(recorded: RecordedRun, start: Resume) -> str | None:
    """Return a message if a run's files cannot be checked because an older version recorded no digests, else None."""
    if recorded.digest is not None and (start.snapshot is None or start.snapshot.folder is not None):
        return None
    which = "this run" if recorded.digest is None else "the snapshot"
    return f"{which} has no digests of its files, so changes to them cannot be detected"


def complete_notice(config: TrainConfig, start: Resume) -> str | None:
    """Return a message if the run that is resumed is complete, so that there is nothing to train; None if it is not."""
    if start.snapshot is None:
        return None
    top1, worse = (_number_in(start.snapshot, name) for name in ("top1", "patience.num_worse"))
    if config.stop_at_top1 is not None and top1 >= np.float32(config.stop_at_top1):
        return (
            f"the run is already complete, with a top-1 of {100 * top1:.2f} %; give a larger --stop-at-top1 to train "
            "further"
        )
    if start.step >= config.steps and not _number_in(start.snapshot, "owes_evaluation"):
        return (
            f"the run is already complete, with {quantity(config.steps, 'step')}; give a larger --steps, or append a "
            "cycle of the schedule (--append-epochs), to train further"
        )
    if config.stop_patience is not None and worse >= config.stop_patience:
        return (
            f"the run is already complete, with {quantity(int(worse), 'evaluation')} in a row that were not better; "
            "give a larger --stop-patience to train further"
        )
    return None


def _number_in(snapshot: "Snapshot", name: str) -> float:
    """Return a number of the state, 0 if there is none: anything else is refused when the state is restored."""
    found = snapshot.leaves.get(name)
    return float(found) if found is not None and not found.shape and found.dtype.kind in "bif" else 0.0


def rewind_run(folder: RunFolder, start: Resume, cuts: Mapping[Path, RunningDigest]) -> None:
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


def draw_state(model: TrainModel, settings: CompiledSettings, words: jax.Array) -> TrainState:
    """Return the initial state that the words of a seed, uint32 [2], determine."""
    # The generator is named, so that the user's default generator changes neither the run nor the key's shape.
    return init_state(model, settings, jax.random.wrap_key_data(words, impl="threefry2x32"))
