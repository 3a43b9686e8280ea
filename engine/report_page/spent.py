"""What the wall time of a run was spent on: from `runtime.json` or, in runs without it, from `result.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.runtime.record import RuntimeReport
from loopfeed.engine.runtime.runtime_file import read_runtime
from loopfeed.preprocess.quantities import quantity


@dataclass(frozen=True)
class Spent:
    """The wall time of a run by what it was spent on.

    Attributes:
        of_what: the launches that it is the time of, such as "2 launches".
        seconds: the parts, by name.
        note: a sentence about what is no part of them, "" for none.
    """

    of_what: str
    seconds: Mapping[str, float]
    note: str


def read_report(run: Path) -> RuntimeReport | Absent:
    """Read the record of the runtime from a run folder."""
    try:
        found = read_runtime(run)
    except ValueError as error:
        return Absent(str(error))
    return Absent("the run has written no runtime.json, as runs of earlier releases") if found is None else found


def spent_time(report: RuntimeReport | Absent, end: Mapping[str, Any] | Absent) -> Spent | Absent:
    """Return what the wall time of a run was spent on; without a record of the runtime, that of its last launch."""
    if isinstance(report, Absent):
        return _from_end(report, end)
    goodput = report.goodput
    if not goodput.total > 0:
        return Absent("the run has just started")
    notes = []
    if goodput.lost_steps:
        notes.append(f"{quantity(goodput.lost_steps, 'step')} were made again after a resume.")
    if goodput.gaps:
        notes.append(f"Between the launches, {goodput.gaps:,.0f} s passed in which nothing ran.")
    return Spent(quantity(len(report.launches), "launch"), goodput.seconds(), " ".join(notes))


def _from_end(absent: Absent, end: Mapping[str, Any] | Absent) -> Spent | Absent:
    if isinstance(end, Absent):
        return absent
    train_s, wait_s, compile_s = (_seconds(end.get(name)) for name in ("train_s", "wait_s", "compile_s"))
    if train_s is None or wait_s is None or compile_s is None or train_s + compile_s <= 0:
        return absent
    seconds = {"compilation": compile_s, "waiting": wait_s, "all else": max(train_s - wait_s, 0.0)}
    return Spent("the last launch", seconds, "From result.json: the run has no runtime.json, which says more.")


def _seconds(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 1e12 else None
