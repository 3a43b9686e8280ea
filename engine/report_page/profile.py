"""The rows of the profiler, as `profile.csv` has them. Must not know: HTML, how they were measured."""

import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from loopfeed.engine.profile.formats import COLUMNS
from loopfeed.engine.records.run_folder import PROFILE
from loopfeed.engine.report_page.absent import Absent
from loopfeed.preprocess.regular_file import read_regular

_MOST_BYTES = 1 << 20
_MOST_ROWS = 500


class ProfileEntry(NamedTuple):
    """A row of the profile; times are in seconds, and a number is NaN where the file has none.

    `scope` is the part of the model, "" in the table of actions; `is_estimated` says whether the row was measured in
    the traced steps only.
    """

    phase: str
    action: str
    mean_s: float
    std_s: float
    calls: float
    samples_per_s: float
    total_s: float
    percent: float
    scope: str
    is_estimated: bool


def read_profile(run: Path) -> tuple[ProfileEntry, ...] | Absent:
    """Read `profile.csv` of a run folder."""
    try:
        text = read_regular(run / PROFILE, max_bytes=_MOST_BYTES).decode()
        lines = list(csv.DictReader(io.StringIO(text)))
    except FileNotFoundError:
        return Absent("the run was not profiled (run-train --profile)")
    except (OSError, ValueError, csv.Error) as error:
        return Absent(f"{PROFILE} cannot be read ({error})")
    if not lines:
        return Absent(f"{PROFILE} has no rows")
    missing = [name for name in COLUMNS if any(line.get(name) is None for line in lines)]
    if missing:
        return Absent(f"{PROFILE} is not a profile: a row has no {missing[0]}")
    return tuple(map(_entry, lines[:_MOST_ROWS]))


def _entry(line: Mapping[str, str]) -> ProfileEntry:
    phase, action, *cells = (line[name] for name in COLUMNS)
    mean_s, std_s, calls, speed, total_s, percent = map(_number, cells)
    scope, is_estimated = line.get("Scope") or "", line.get("Estimated") == "1"
    return ProfileEntry(phase, action, mean_s, std_s, calls, speed, total_s, percent, scope, is_estimated)


def _number(cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        return math.nan
    return value if abs(value) < 1e15 else math.nan
