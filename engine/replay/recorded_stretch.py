"""The record of a range of updates of a run: the losses, the evaluations, and the training states at both ends.

Owns what is needed to replay the range. Only reads, without taking the run's lock, so that the run can continue
meanwhile. Must not know: the loop.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from loopfeed.engine.config import COUNTED_IN_EPOCHS, TrainConfig
from loopfeed.engine.records.control_log import CONTROL_LOG_NAME, read_events
from loopfeed.engine.records.json_lines import read_lines
from loopfeed.engine.records.limits import LONGEST_LINE_BYTES
from loopfeed.engine.records.recorded_run import RecordedRun, read_recorded
from loopfeed.engine.records.run_folder import EVALUATION_LOG, LOSS_LOG, SNAPSHOTS
from loopfeed.engine.records.snapshot import Snapshot, read_snapshot, snapshot_steps
from loopfeed.engine.run.resume import Resume, start_at
from loopfeed.preprocess.regular_file import open_regular

LOSS_NUMBERS = ("loss", "lr")
EVALUATION_NUMBERS = ("num_images", "top1", "top5", "loss")

type Numbers = dict[str, float | None]


@dataclass(frozen=True)
class Piece:
    """A part of the range to replay: consecutive updates with the same settings.

    Attributes:
        config: the settings, without a run folder and without snapshots.
        stop_step: the last update.
        stop_batch: the batch (from 0) before which the piece ends.
        cuts_evaluation: whether the piece ends before an evaluation that is due after its last update.
    """

    config: TrainConfig
    stop_step: int
    stop_batch: int
    cuts_evaluation: bool


@dataclass(frozen=True)
class RecordedStretch:
    """The record of the updates `start.step` + 1 … `to_step` of a run.

    Attributes:
        run: the folder of the run.
        recorded: its settings.
        start: where the range begins.
        to_step: its last update.
        losses: the numbers of every step, by step; None represents a NaN or infinite number.
        evaluations: the evaluations after these steps.
        snapshot: the snapshot of `to_step`, None if there is none.
        pieces: the pieces of the range, in order.
        is_evaluated: whether the run has any evaluation at all.
    """

    run: Path
    recorded: RecordedRun
    start: Resume
    to_step: int
    losses: dict[int, Numbers]
    evaluations: "RecordedEvaluations"
    snapshot: Snapshot | None
    pieces: tuple[Piece, ...]
    is_evaluated: bool


def read_stretch(run: Path, from_step: int | None, to_step: int | None) -> RecordedStretch:
    """Read the record of a range of updates of a run.

    Args:
        run: the folder of the run.
        from_step: a step with a snapshot, or 0 for the state initialised from the seed; None selects the oldest
            snapshot before the end or, without one, 0.
        to_step: the last update; None selects the last one that the run recorded.

    Raises:
        ValueError: if RUN is not a run, `from_step` or `to_step` is not available, or a line is missing.
        OSError: if a file cannot be read.
    """
    recorded = read_recorded(run)
    # In this order: a running training writes an evaluation before the next loss, and a snapshot after both.
    lines = list(read_lines(run / LOSS_LOG))
    to_step = _checked_end(run, to_step, len(lines))
    saved_steps = snapshot_steps(run / SNAPSHOTS)
    from_step = _checked_begin(from_step, to_step, saved_steps)
    events = tuple(replace(event, snapshot=False) for event in read_events(run / CONTROL_LOG_NAME))
    start = Resume(events=events, recorded=recorded)
    if from_step:
        start = start_at(read_snapshot(run / SNAPSHOTS, from_step), start)
    snapshot = read_snapshot(run / SNAPSHOTS, to_step) if to_step in saved_steps else None
    places = _find_evaluations(run / EVALUATION_LOG)
    # An evaluation that a stop interrupted after a snapshot's step is repeated when the run resumes from it.
    first = from_step if _owes_evaluation(start.snapshot) else from_step + 1
    last = to_step - 1 if _owes_evaluation(snapshot) else to_step
    return RecordedStretch(
        run=run,
        recorded=recorded,
        start=start,
        to_step=to_step,
        losses=_losses(run / LOSS_LOG, lines, from_step, to_step),
        evaluations=RecordedEvaluations(
            run / EVALUATION_LOG, {step: place for step, place in places.items() if first <= step <= last}
        ),
        snapshot=snapshot,
        pieces=_pieces(
            run, recorded, from_step, to_step, snapshot, is_end_evaluated=to_step in places or to_step < len(lines)
        ),
        is_evaluated=bool(places),
    )


def _checked_end(run: Path, to_step: int | None, num_lines: int) -> int:
    if not num_lines:
        raise ValueError(
            f"a run must have completed a step to be replayed, but {run / LOSS_LOG} contains no step: wait for the "
            "first step"
        )
    if to_step is None:
        return num_lines
    if not 1 <= to_step <= num_lines:
        raise ValueError(
            f"the last step to replay (--to) must be a step in {run / LOSS_LOG}, 1 … {num_lines}, got {to_step}"
        )
    return to_step


def _checked_begin(from_step: int | None, to_step: int, saved_steps: Sequence[int]) -> int:
    before = [step for step in saved_steps if step < to_step]
    if from_step is None:
        return before[0] if before else 0
    if from_step not in (0, *before):
        choices = " or ".join(map(str, sorted({0, *before})))
        raise ValueError(
            "the step to start from (--from) must be 0 or have a snapshot, and be before the last step to replay, "
            f"{to_step}, got {from_step}: choose {choices}"
        )
    return from_step


def _owes_evaluation(snapshot: Snapshot | None) -> bool:
    """Return whether a snapshot was written while the evaluation after its step was still due.

    In a snapshot within an update, `owes_evaluation` refers to the next step.
    """
    if snapshot is None or not snapshot.leaves["owes_evaluation"]:
        return False
    gathered = [leaf for name, leaf in snapshot.leaves.items() if name.endswith("gathered.num_pulls")]
    return not any(gathered)


def _pieces(
    run: Path,
    recorded: RecordedRun,
    from_step: int,
    to_step: int,
    snapshot: Snapshot | None,
    *,
    is_end_evaluated: bool,
) -> tuple[Piece, ...]:
    """Split a range of updates at the steps where settings changed."""
    saved_steps = snapshot_steps(run / SNAPSHOTS)
    ends = [step for step in recorded.changes() if from_step < step < to_step]
    pieces = []
    for begin, end in pairwise([from_step, *ends, to_step]):
        config = replace(recorded.replayed_config(begin + 1), **_REPLAY_SETTINGS)
        if begin:
            # Initial weights concern only the first step.
            config = replace(config, init_from=None)
        at_end = snapshot if end == to_step else read_snapshot(run / SNAPSHOTS, end) if end in saved_steps else None
        batch_index = end * config.accumulate_steps if at_end is None else at_end.batch_index
        # The last lines of a run that is still in progress, or was killed, may lack the evaluation that comes next.
        is_cut = _owes_evaluation(at_end) if at_end is not None else end == to_step and not is_end_evaluated
        pieces.append(Piece(config, end, batch_index, is_cut))
    return tuple(pieces)


_REPLAY_SETTINGS: dict[str, Any] = {
    # Epochs were converted to steps when the run started.
    **dict.fromkeys((epochs for epochs, _ in COUNTED_IN_EPOCHS), None),
    "snapshot_every_steps": 0,
}


def _losses(path: Path, lines: Sequence[bytes], from_step: int, to_step: int) -> dict[int, Numbers]:
    losses = {}
    for step in range(from_step + 1, to_step + 1):
        found, losses[step] = _numbers(path, step, lines[step - 1], LOSS_NUMBERS)
        if found != step:
            raise ValueError(f"{path} must have step {step} in line {step}, but has step {found}: restore that file")
    return losses


@dataclass(frozen=True)
class RecordedEvaluations:
    """The evaluations of a run. Each is read when it is asked for, because it may have long lists.

    Attributes:
        path: the log.
        places: for each step, in ascending order, the number of its line, from 1, and where it begins in the file.
    """

    path: Path
    places: Mapping[int, tuple[int, int]]

    def read(self, step: int) -> Numbers | None:
        """Return the numbers of the evaluation after a step, None if there was none."""
        if step not in self.places:
            return None
        number, begin = self.places[step]
        with os.fdopen(open_regular(self.path), "rb") as file:
            file.seek(begin)
            return _numbers(self.path, number, file.readline(LONGEST_LINE_BYTES), EVALUATION_NUMBERS)[1]


def _find_evaluations(path: Path) -> dict[int, tuple[int, int]]:
    """Return where each evaluation of a log stands; raise ValueError for a line that is not an evaluation's."""
    places: dict[int, tuple[int, int]] = {}
    begin, last = 0, -1
    for number, line in enumerate(read_lines(path), start=1):
        step, _ = _numbers(path, number, line, EVALUATION_NUMBERS)
        if step <= last:
            raise ValueError(
                f"{path} must have its steps in order, but has step {step} in line {number} after {last}: "
                "restore that file"
            )
        places[step], last = (number, begin), step
        begin += len(line)
    return places


def _numbers(path: Path, line_number: int, line: bytes, names: Sequence[str]) -> tuple[int, Numbers]:
    try:
        values = json.loads(line)
        numbers = {name: values[name] for name in names} | flatten_metrics(values)
        step = values["step"]
        if type(step) is not int or any(type(number) not in (int, float, type(None)) for number in numbers.values()):
            raise TypeError("not numbers")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f"{path} must have step, {', '.join(names)} in line {line_number}, but has {line.rstrip()[:80]!r}: restore "
            "that file"
        ) from None
    return step, numbers


def flatten_metrics(line: Mapping[str, Any]) -> Numbers:
    """Return the numbers of a line's metrics by name, such as "metrics.top3" or "metrics.confusion[0][2]"."""
    found: Numbers = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, list):
            for index, each in enumerate(value):
                add(f"{name}[{index}]", each)
        else:
            found[name] = value

    for name, value in line.get("metrics", {}).items():
        add(f"metrics.{name}", value)
    return found
