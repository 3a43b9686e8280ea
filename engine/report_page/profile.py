"""The tables of the profiler, as `profile.csv` has them.

Must not know: HTML, how they were measured.
"""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loopfeed.engine.profile.formats import COLUMNS
from loopfeed.engine.records.run_folder import PROFILE
from loopfeed.engine.report_page.absent import Absent
from loopfeed.preprocess.regular_file import read_regular

_MOST_BYTES = 1 << 20
_MOST_ROWS = 500
_SCOPE, _ESTIMATED = "Scope", "Estimated"


@dataclass(frozen=True)
class ProfileEntry:
    """A row of the profile; numbers are NaN where the file has none.

    Attributes:
        phase, action: what took the time.
        scope: the part of the model, "" in the table of actions.
        mean_s, std_s: mean and standard deviation of the duration, in seconds.
        calls: number of times.
        samples_per_s: images per second.
        total_s: total duration, in seconds.
        percent: its share in the total, 0 … 100.
        is_estimated: whether it was measured in the traced steps only.
    """

    phase: str
    action: str
    scope: str
    mean_s: float
    std_s: float
    calls: float
    samples_per_s: float
    total_s: float
    percent: float
    is_estimated: bool


@dataclass(frozen=True)
class ProfileTable:
    """The rows of `profile.csv`: the table of actions, and that of the scopes inside them."""

    actions: tuple[ProfileEntry, ...]
    scopes: tuple[ProfileEntry, ...]


def read_profile(run: Path) -> ProfileTable | Absent:
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
    entries = [_entry(line) for line in lines[:_MOST_ROWS]]
    return ProfileTable(
        tuple(each for each in entries if not each.scope), tuple(each for each in entries if each.scope)
    )


def _entry(line: Mapping[str, str]) -> ProfileEntry:
    phase, action, *numbers = (line[name] for name in COLUMNS)
    mean_s, std_s, calls, samples_per_s, total_s, percent = map(_number, numbers)
    scope, is_estimated = line.get(_SCOPE) or "", line.get(_ESTIMATED) == "1"
    return ProfileEntry(phase, action, scope, mean_s, std_s, calls, samples_per_s, total_s, percent, is_estimated)


def _number(cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        return math.nan
    return value if abs(value) < 1e15 else math.nan
