"""A run on the page, with everything that the page shows of it, down to the rows of its profile.

Every file of a run may be missing, damaged or of an older version: what is then missing becomes an `Absent` with the
reason. Must not know: HTML, programs.
"""

import csv
import io
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loopfeed.engine.control.request import ControlEvent
from loopfeed.engine.profile.formats import COLUMNS
from loopfeed.engine.records.control_log import CONTROL_LOG_NAME, read_events
from loopfeed.engine.records.evaluation_log import EvaluationLog
from loopfeed.engine.records.loss_log import RunEnd
from loopfeed.engine.records.machine import Topology
from loopfeed.engine.records.recorded_run import RecordedRun, read_recorded
from loopfeed.engine.records.run_folder import EVALUATION_LOG, LOSS_LOG, PROFILE
from loopfeed.engine.records.run_summary import RunSummary, summarise_run
from loopfeed.engine.records.trained_run import check_folder
from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.curves import Curves, read_curves
from loopfeed.engine.report_page.data_card import SplitCard
from loopfeed.engine.report_page.evaluated import Decisions, EvaluatedWeights
from loopfeed.engine.runtime.record import RuntimeReport
from loopfeed.engine.runtime.runtime_file import read_runtime
from loopfeed.engine.stream.sinks import EvaluationRecord
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.storage_options import is_url
from loopfeed.preprocess.system_errors import error_text

_MOST_BYTES = 1 << 20
_MOST_ROWS = 500


_PROFILE = ("mean_s", "std_s", "calls", "samples_per_s", "total_s", "percent")
"""The numbers of a row of the profile, in the order of the file; NaN where it has none."""


def read_profile(run: Path) -> tuple[dict[str, Any], ...] | Absent:
    """Read `profile.csv` of a run folder: for each row, its texts and numbers by name; `scope` is "" for an action."""
    try:
        text = read_regular(run / PROFILE, max_bytes=_MOST_BYTES).decode()
        lines = list(csv.DictReader(io.StringIO(text)))
    except FileNotFoundError:
        return Absent("the run was not profiled (run-train --profile)")
    except (OSError, ValueError, csv.Error) as error:
        return Absent(f"{PROFILE} cannot be read ({error_text(error)})")
    if not lines:
        return Absent(f"{PROFILE} has no rows")
    missing = [name for name in COLUMNS if any(line.get(name) is None for line in lines)]
    if missing:
        return Absent(f"{PROFILE} is not a profile: a row has no {missing[0]}")
    return tuple(map(_entry, lines[:_MOST_ROWS]))


def _entry(line: Mapping[str, str]) -> dict[str, Any]:
    phase, action, *cells = (line[name] for name in COLUMNS)
    about = {"phase": phase, "action": action, "scope": line.get("Scope") or ""}
    return (
        about | {"is_estimated": line.get("Estimated") == "1"} | dict(zip(_PROFILE, map(_number, cells), strict=True))
    )


def _number(cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        return math.nan
    return value if abs(value) < 1e15 else math.nan


_NO_RUNTIME = Absent("the run has written no runtime.json, as runs of earlier releases")
_UNKNOWN = Absent("the settings of the run, which name its data and its model, cannot be read")


@dataclass(frozen=True)
class Evaluations:
    """The evaluations during a run, oldest first, one for each step."""

    records: tuple[EvaluationRecord, ...]  # all, or of very many every n-th, the best and the last
    every: int  # n, 1 if none is left out


@dataclass(frozen=True)
class Spent:
    """What the wall time of some launches was spent on."""

    of_what: str  # the launches, such as "2 launches"
    seconds: Mapping[str, float]  # the parts, by name
    note: str  # a sentence about what is no part of them, "" for none


@dataclass(frozen=True, eq=False)
class RunOnPage:
    """A run on the page."""

    index: int  # its place among the runs, which is also its colour, dashes and markers in charts
    path: str  # the folder or URL that was given
    summary: RunSummary  # whether it is in progress, and how it ended
    recorded: RecordedRun | Absent  # the settings and what they resolved to
    curves: Curves | Absent  # the losses
    evaluations: Evaluations | Absent  # the evaluations during the run
    events: tuple[ControlEvent, ...] | Absent  # the requests that took effect
    runtime: RuntimeReport | Absent  # what the runtime did in each launch
    profile: tuple[dict[str, Any], ...] | Absent  # the rows of the profiler
    card: tuple[str, tuple[SplitCard, ...]] | Absent = _UNKNOWN  # its data set: the place, and the splits
    weights: EvaluatedWeights | Absent = _UNKNOWN  # the evaluation of its weights

    @property
    def letter(self) -> str:
        """Its name in charts and tables, "A" for the first run."""
        return chr(ord("A") + self.index)

    @property
    def name(self) -> str:
        """The last part of its path or URL."""
        return self.path.rstrip("/").rpartition("/")[2] if is_url(self.path) else Path(self.path).absolute().name

    @property
    def state(self) -> str:
        """What the run does, or how it ended, as a sentence without its full stop."""
        summary = self.summary
        match summary.state:
            case "done" | "failed" | "stopped":
                return replace(RunEnd.of(summary.result), steps_done=summary.step).line(summary.steps)
            case "starting" | "running":
                return "the run is in progress"
            case "killed":
                return "the run was killed: its process has ended, or written nothing for 10 minutes, without a result"
            case "damaged" | "foreign":
                return f"the run folder is damaged: {summary.fault}"

    @property
    def spent(self) -> Spent | Absent:
        """What the wall time was spent on."""
        if isinstance(self.runtime, Absent):
            return self.runtime
        goodput, notes = self.runtime.goodput, []
        if not goodput.total > 0:
            return Absent("the run has just started")
        if goodput.lost_steps:
            notes.append(f"{quantity(goodput.lost_steps, 'step')} were made again after a resume.")
        if goodput.gaps:
            notes.append(f"Between the launches, {goodput.gaps:,.0f} s passed in which nothing ran.")
        return Spent(quantity(len(self.runtime.launches), "launch"), goodput.seconds(), " ".join(notes))

    @property
    def decisions(self) -> Decisions | Absent:
        """What the decisions on the images show."""
        return self.weights if isinstance(self.weights, Absent) else self.weights.decisions

    @property
    def class_results(self) -> EvaluatedWeights | Absent:
        """The evaluation, if it counted each class."""
        if isinstance(self.weights, Absent) or self.weights.classes:
            return self.weights
        return Absent("accuracies of classes exist only for images of one class each, and this run has other labels")

    @property
    def num_params(self) -> int | None:
        """The number of parameters of its model, None if it has not recorded it."""
        found = self.summary.result.get("num_params")
        return found if type(found) is int else None

    @property
    def devices(self) -> str:
        """The devices that it ran on."""
        with suppress(KeyError, ValueError, TypeError):
            if not isinstance(self.recorded, Absent):
                return str(Topology.from_json(self.recorded.resolved))
        return "not recorded"


def read_run(index: int, folder: Path, path: str, most_points: int) -> RunOnPage:
    """Read a run folder, without its data set and weights.

    Args:
        index: its place among the runs.
        folder: the folder, or that of a copy of a stored run.
        path: what was given for it.
        most_points: the largest number of points of a curve.

    Raises:
        ValueError: if it is no run folder.
    """
    if not (folder / LOSS_LOG).is_file():  # which has a page without the settings too
        check_folder(folder, path)
    summary = summarise_run(folder, time.time(), path)
    return RunOnPage(
        index=index,
        path=path,
        summary=summary,
        recorded=_or_absent(lambda: read_recorded(folder)),
        curves=read_curves(folder, most_points),
        evaluations=_read_evaluations(folder, most_points, summary.best_step),
        events=_or_absent(lambda: read_events(folder / CONTROL_LOG_NAME)),
        runtime=_or_absent(lambda: read_runtime(folder) or _NO_RUNTIME),
        profile=read_profile(folder),
    )


def _or_absent[T](read: Callable[[], T]) -> T | Absent:
    try:
        return read()
    except OSError as error:
        return Absent(f"{error.filename} cannot be read ({error.strerror or error})")
    except ValueError as error:
        return Absent(str(error))


def _read_evaluations(folder: Path, most: int, best_step: int | None) -> Evaluations | Absent:
    """Return at most `most` + 2 of the evaluations, evenly spaced, always with the last and the best."""
    try:
        # A later line replaces an earlier one of the same step.
        by_step = {record.step: record for record in EvaluationLog(folder / EVALUATION_LOG).read()}
    except (OSError, ValueError) as error:
        return Absent(f"{EVALUATION_LOG} cannot be read ({error_text(error)})")
    if not by_step:
        return Absent("the run has not been evaluated yet, or had no images to be evaluated on")
    steps = sorted(by_step)
    every = -(-len(steps) // most)
    kept = {*steps[::every], steps[-1], *(step for step in steps if step == best_step)}
    return Evaluations(tuple(by_step[step] for step in sorted(kept)), every)
