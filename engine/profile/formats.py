"""A profile as text: plain for a terminal of 80 columns, Markdown, CSV or JSON."""

import csv
import io
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from loopfeed.engine.config import ProfileFormat
from loopfeed.engine.profile.table import Profile, ProfileRow, ScopeRow
from loopfeed.preprocess.printable import spreadsheet_cell

COLUMNS = (
    "Phase",
    "Action",
    "Mean Duration",
    "Duration Std Dev",
    "Number of Calls",
    "Samples/Second",
    "Total Time",
    "Percent of Total",
)
"""The columns of the table of actions, as in fastxtend."""

_SCOPE, _ESTIMATED = "Scope", "Estimated"
_WIDTH = 80
_MARK = "*"
# Headings in two lines, so that all columns fit on a terminal.
_NARROW = {
    "Mean Duration": ("Mean", "Duration"),
    "Duration Std Dev": ("Duration", "Std Dev"),
    "Number of Calls": ("Number", "of Calls"),
    "Samples/Second": ("Samples", "/Second"),
    "Total Time": ("Total", "Time"),
    "Percent of Total": ("Percent", "of Total"),
}
_MILLION, _BILLION = 1_000_000, 1_000_000_000
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))

type _Row = ProfileRow | ScopeRow


def format_profile(profile: Profile, form: ProfileFormat) -> str:
    """Return both tables of a profile as text in one of the formats, with a newline at the end."""
    forms = {"plain": _plain, "markdown": _markdown, "csv": to_csv, "json": to_json}
    return forms[form](profile)


def to_csv(profile: Profile) -> str:
    """Return both tables as one CSV table: fastxtend's columns, then the scope and whether the row is estimated.

    Durations are in seconds, empty cells have no value; rows of the table of actions have no scope.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*COLUMNS, _SCOPE, _ESTIMATED])
    rows: list[_Row] = [*profile.rows, *profile.scopes]
    for row in rows:
        values = [row.mean_s, row.std_s, row.calls, row.samples_per_s, row.total_s, row.percent]
        about = [spreadsheet_cell(row.scope), 1] if isinstance(row, ScopeRow) else ["", int(row.is_estimated)]
        writer.writerow([*map(spreadsheet_cell, (row.phase, row.action)), *values, *about])
    return out.getvalue()


def to_json(profile: Profile) -> str:
    """Return the profile as JSON: `rows`, `scopes`, `traced` and `notes`, with the fields of their types."""
    return json.dumps(asdict(profile), indent=2) + "\n"


def _plain(profile: Profile) -> str:
    headings = [_NARROW.get(column, ("", column)) for column in COLUMNS]
    lines = ["", *_table(headings, _cells(profile.rows), num_names=2)]
    if profile.scopes:
        headings.insert(2, ("", _SCOPE))
        # The deviation gives way to the scope.
        at = 4
        lines += ["", *_table(_without(headings, at), [_without(row, at) for row in _cells(profile.scopes)], 3)]
    notes = [each for note in profile.notes for each in textwrap.wrap(note, _WIDTH)]
    return "\n".join([*lines, "", *notes, ""]) if notes else "\n".join([*lines, ""])


def _markdown(profile: Profile) -> str:
    lines = _markdown_table(COLUMNS, _cells(profile.rows), num_names=2)
    if profile.scopes:
        lines += ["", *_markdown_table((*COLUMNS[:2], _SCOPE, *COLUMNS[2:]), _cells(profile.scopes), num_names=3)]
    for note in profile.notes:
        lines += ["", note.replace(_MARK, "\\" + _MARK)]
    return "\n".join([*lines, ""])


def _cells(rows: Sequence[_Row]) -> list[list[str]]:
    """Return the cells of a table as text; a phase and an action that repeat the row above are empty."""
    found, before = [], ("", "")
    for row in rows:
        names = [row.phase if row.phase != before[0] else "", row.action]
        if isinstance(row, ScopeRow):
            names[1:] = [row.action if (row.phase, row.action) != before else "", row.scope]
        elif row.is_estimated:
            names[1] += _MARK
        before = row.phase, row.action
        found.append(
            [
                *names,
                describe_seconds(row.mean_s),
                describe_seconds(row.std_s) if row.calls > 1 and row.std_s is not None else "-",
                f"{row.calls:,}" if row.calls < _MILLION else _abbreviate(row.calls),
                "-" if row.samples_per_s is None else _describe_rate(row.samples_per_s),
                describe_seconds(row.total_s),
                f"{row.percent:.1f} %",
            ]
        )
    return found


def describe_seconds(seconds: float) -> str:
    """Return a duration in at most eight characters, for up to ten years: in h, s, ms or µs."""
    if seconds >= 99_999.5:
        return f"{seconds / 3600:,.0f} h"
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    unit_s, name = next((unit for unit in _UNITS if seconds >= unit[0]), _UNITS[-1])
    number = seconds / unit_s
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {name}"


def _describe_rate(rate: float) -> str:
    if abs(rate) < 0.5 * _MILLION:
        return f"{rate:z,.0f}"
    return _abbreviate(rate)


def _abbreviate(number: float) -> str:
    unit, name = (_MILLION, "M") if abs(number) < 1000 * _MILLION else (_BILLION, "G")
    return f"{number / unit:,.{1 if abs(number) < 100 * unit else 0}f} {name}"


def _table(headings: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], num_names: int) -> list[str]:
    lines = [list(line) for line in zip(*headings, strict=True)]
    widths = [max(len(line[at]) for line in (*lines, *rows)) for at in range(len(headings))]
    if num_names > 2:
        # Without scopes the numbers are short enough, and a part of an action's name could be the name of another.
        _shorten_scopes(widths, rows, at=num_names - 1)

    def joined(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if at < num_names else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    return [*(joined(line) for line in lines), joined(["─" * width for width in widths]), *map(joined, rows)]


def _shorten_scopes(widths: list[int], rows: Sequence[Sequence[str]], at: int) -> None:
    """Narrow the column of scopes, by an ellipsis in its cells, if the table is wider than the terminal."""
    excess = sum(widths) + 2 * (len(widths) - 1) - _WIDTH
    if excess <= 0:
        return
    widths[at] = max(widths[at] - excess, 1)
    for row in rows:
        assert isinstance(row, list)
        if len(row[at]) > widths[at]:
            row[at] = "…" + row[at][1 - widths[at] :] if widths[at] > 1 else "…"


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], num_names: int) -> list[str]:
    alignment = ["---" if at < num_names else "---:" for at in range(len(headings))]
    escaped = [[cell.replace("|", "\\|").replace(_MARK, "\\" + _MARK) for cell in row] for row in rows]
    return ["| " + " | ".join(cells) + " |" for cells in (headings, alignment, *escaped)]


def _without[T](cells: Sequence[T], at: int) -> list[T]:
    return [*cells[:at], *cells[at + 1 :]]
