"""The table of the profiler, as `profile.csv` has it.

Takes the columns as they are, except the two that the bars need. Must not know: HTML, how it was measured.
"""

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path

from engine.report_page.absent import Absent
from preprocess.regular_file import read_regular

PROFILE = "profile.csv"
PERCENT_COLUMN = "Percent of Total"
_MOST_BYTES = 1 << 20
_MOST_ROWS = 200


@dataclass(frozen=True)
class ProfileTable:
    """The cells of `profile.csv`.

    Attributes:
        columns: the names of the columns.
        rows: the cells of each row, as many as there are columns.
        percents: the share of each row in the total, 0 … 100, NaN if the file has none.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    percents: tuple[float, ...]


def read_profile(run: Path) -> ProfileTable | Absent:
    """Read `profile.csv` of a run folder."""
    try:
        text = read_regular(run / PROFILE, max_bytes=_MOST_BYTES).decode()
        lines = [line for line in csv.reader(io.StringIO(text)) if line]
    except FileNotFoundError:
        return Absent("the run was not profiled (run-train --profile)")
    except (OSError, ValueError, csv.Error) as error:
        return Absent(f"{PROFILE} cannot be read ({error})")
    if len(lines) < 2:
        return Absent(f"{PROFILE} has no rows")
    columns, rows = lines[0], lines[1 : _MOST_ROWS + 1]
    if any(len(row) != len(columns) for row in rows):
        return Absent(f"{PROFILE} has rows of another length than its heading")
    place = columns.index(PERCENT_COLUMN) if PERCENT_COLUMN in columns else None
    percents = tuple(math.nan if place is None else _percent(row[place]) for row in rows)
    return ProfileTable(tuple(columns), tuple(map(tuple, rows)), percents)


def _percent(cell: str) -> float:
    try:
        value = float(cell.strip().removesuffix("%"))
    except ValueError:
        return math.nan
    return value if 0 <= value <= 100 else math.nan
