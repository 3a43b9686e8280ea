"""What the page shows of one run, read from its folder.

Every file may be missing, damaged or of an older version: what is then missing becomes an `Absent` with the reason.
Must not know: HTML, programs.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopfeed.engine.control.event import ControlEvent
from loopfeed.engine.records.control_log import CONTROL_LOG_NAME, read_events
from loopfeed.engine.records.evaluation_log import EvaluationLog
from loopfeed.engine.records.loss_log import RunFacts as RecordedFacts
from loopfeed.engine.records.loss_log import read_run_facts
from loopfeed.engine.records.recorded_run import RecordedRun, read_recorded
from loopfeed.engine.records.run_folder import CONFIG, EVALUATION_LOG, LOSS_LOG, RESULT
from loopfeed.engine.records.run_summary import RunSummary, summarise_run
from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.curves import Curves, read_curves
from loopfeed.engine.report_page.profile import ProfileTable, read_profile
from loopfeed.engine.report_page.spent import Spent, read_report, spent_time
from loopfeed.engine.runtime.record import RuntimeReport
from loopfeed.engine.stream.sinks import EvaluationRecord
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.storage_options import is_url
from loopfeed.preprocess.system_errors import status_of


@dataclass(frozen=True)
class Evaluations:
    """The evaluations during a run, oldest first, one for each step.

    Attributes:
        records: all, or of very many every n-th, the best and the last.
        every: n, 1 if none is left out.
    """

    records: tuple[EvaluationRecord, ...]
    every: int


@dataclass(frozen=True)
class RunFacts:
    """The content of a run folder, as far as it can be read.

    Attributes:
        path: the folder or URL that was given.
        name: the last part of it.
        summary: whether the run is in progress, and how it ended.
        state: the same as a sentence without its full stop.
        known: steps, batch size and model, as far as known.
        recorded: the settings and what they resolved to.
        end: the content of `result.json`.
        curves: the losses.
        evaluations: the evaluations during the run.
        events: the requests that took effect.
        runtime: what the runtime did in each launch.
        spent: what the wall time was spent on.
        profile: the table of the profiler.
    """

    path: str
    name: str
    summary: RunSummary
    state: str
    known: RecordedFacts
    recorded: RecordedRun | Absent
    end: Mapping[str, Any] | Absent
    curves: Curves | Absent
    evaluations: Evaluations | Absent
    events: tuple[ControlEvent, ...] | Absent
    runtime: RuntimeReport | Absent
    spent: Spent | Absent
    profile: ProfileTable | Absent


def read_facts(folder: Path, path: str, most_points: int) -> RunFacts:
    """Read a run folder.

    Args:
        folder: the folder, or that of a copy of a stored run.
        path: what was given for it.
        most_points: the largest number of points of a curve.

    Raises:
        ValueError: if it is no run folder.
    """
    check_is_run(folder, path)
    summary = summarise_run(folder, time.time(), path)
    end = _end_of(summary)
    known, runtime = read_run_facts(folder), read_report(folder)
    return RunFacts(
        path=path,
        name=_name_of(path),
        summary=summary,
        state=_describe_state(summary),
        known=known,
        recorded=_or_absent(lambda: read_recorded(folder)),
        end=end,
        curves=read_curves(folder, most_points),
        evaluations=_read_evaluations(folder, most_points),
        events=_or_absent(lambda: read_events(folder / CONTROL_LOG_NAME)),
        runtime=runtime,
        spent=spent_time(runtime, end),
        profile=read_profile(folder),
    )


def _name_of(path: str) -> str:
    """Return the last part of a path or URL."""
    return path.rstrip("/").rpartition("/")[2] if is_url(path) else Path(path).absolute().name


def check_is_run(folder: Path, path: str) -> None:
    """Raise ValueError if a folder contains neither the settings nor the losses of a run."""
    if any((folder / name).is_file() for name in (CONFIG, LOSS_LOG)):
        return
    if not folder.is_dir():
        found = "does not exist" if status_of(folder) is None else "is a file"
    else:
        below = sorted(each.parent.name for each in folder.glob(f"*/{CONFIG}"))
        found = f"has neither {CONFIG} nor {LOSS_LOG}"
        if below:
            found = f"contains {quantity(len(below), 'run folder')}, such as {folder / below[-1]}"
    raise ValueError(f"RUN must be a run folder, but {path} {found}: give the --run-dir of run-train")


def _or_absent[T](read: Callable[[], T]) -> T | Absent:
    try:
        return read()
    except OSError as error:
        return Absent(f"{error.filename} cannot be read ({error.strerror or error})")
    except ValueError as error:
        return Absent(str(error))


def _end_of(summary: RunSummary) -> Mapping[str, Any] | Absent:
    return summary.result or Absent(f"the run has written no end in {RESULT}")


def _describe_state(summary: RunSummary) -> str:
    """Return what a run does, or how it ended, as a sentence without its full stop."""
    end, steps = summary.result, "an unknown number of steps"
    if summary.step is not None:
        steps = quantity(summary.step, "step")
    match summary.state:
        case "done" if end.get("stopped_by") == "top1":
            return f"the run reached the accuracy that it was to stop at, after {steps}"
        case "done":
            return f"the run is complete, with {steps}"
        case "failed":
            return f"the run failed after {steps}: {end.get('error')}"
        case "stopped":
            planned = "" if summary.steps is None else f" of {summary.steps:,}"
            return f"the run was stopped by {end.get('stopped_by')} after {steps}{planned}"
        case "starting" | "running":
            return "the run is in progress"
        case "killed":
            return "the run was killed: its process has ended, or written nothing for 10 minutes, without a result"
        case "damaged" | "foreign":
            return f"the run folder is damaged: {summary.fault}"


def _read_evaluations(folder: Path, most: int) -> Evaluations | Absent:
    try:
        found = EvaluationLog(folder / EVALUATION_LOG).read()
    except (OSError, ValueError) as error:
        return Absent(f"{EVALUATION_LOG} cannot be read ({error})")
    # A later line replaces an earlier one of the same step.
    by_step = {each.step: each for each in found}
    if not by_step:
        return Absent("the run has not been evaluated yet, or had no images to be evaluated on")
    return _thinned([by_step[step] for step in sorted(by_step)], most)


def _thinned(records: Sequence[EvaluationRecord], most: int) -> Evaluations:
    """Return at most `most` + 2 of the evaluations, evenly spaced, always with the last and the best."""
    best = max(range(len(records)), key=lambda index: (not math.isnan(records[index].top1), records[index].top1))
    every = -(-len(records) // most)
    kept = {*range(0, len(records), every), best, len(records) - 1}
    return Evaluations(tuple(records[index] for index in sorted(kept)), every)
