"""The table of `list-runs`: a line for each run, with the settings in which the runs differ.

Must not know: files, terminals.
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loopfeed.engine.commands.run_names import shorten_names, without_middle
from loopfeed.engine.config import COMPILATION, DATA, INFEED, MONITORING, OUTPUT, SETTINGS
from loopfeed.engine.objective.best_metric import parse_metric
from loopfeed.engine.records.evaluation_log import value_text
from loopfeed.engine.records.run_summary import RunSummary
from loopfeed.engine.settings import Owner
from loopfeed.preprocess.printable import printable_line
from loopfeed.preprocess.quantities import duration_text

_GAP = 2
_LEAST_NAME_WIDTH = 16
_LONGEST_SETTING = 24
# Ranks of the columns of the most telling settings; the speed stands between the first and the second.
_SETTING_RANKS, _SPEED_RANK, _DURATION_RANK, _AGE_RANK, _LEAST_RANK = (5, 7, 8), 6, 14, 15, 20
# Settings that most often tell why one run is better than another, and groups and settings that seldom do.
_TELLING = ("learning_rate", "model", "optimizer", "schedule", "batch", "precision")
_SELDOM_TELLING = (INFEED, OUTPUT, MONITORING, COMPILATION, DATA)
_LESS_TELLING = ("seed", "steps", "epochs", "num_classes", "eval_every_steps", "eval_every_epochs")


@dataclass(frozen=True)
class _Column:
    """A column of the table; a lower rank is more important."""

    title: str
    cells: list[str]
    rank: float
    is_number: bool = False

    @property
    def width(self) -> int:
        return max(len(self.title), *map(len, self.cells))

    def lines(self, width: int) -> list[str]:
        texts = [self.title, *self.cells]
        return [text.rjust(width) if self.is_number else text.ljust(width) for text in texts]


def differing_settings(runs: Sequence[RunSummary]) -> list[str]:
    """Return the names of the settings in which the runs differ, in the order of their declaration.

    Settings of one launch, such as the folder, are left out. A setting that an older run did not record has its
    default.
    """
    recorded = [run for run in runs if run.settings]
    known = [name for name in SETTINGS if SETTINGS[name].owner is not Owner.LAUNCH]
    unknown = sorted({name for run in recorded for name in run.settings} - SETTINGS.keys())
    return [
        name
        for name in [*known, *unknown]
        if len({comparable_setting(setting_of(each, name)) for each in recorded}) > 1
    ]


def setting_of(run: RunSummary, name: str) -> Any:
    """Return the value of a setting that a run used: as recorded, else as derived from the data, else its default.

    None if this version does not know the setting. The model is the one that was trained, of your own too.
    """
    if name == "model" and "model" in run.resolved:
        return run.resolved["model"]
    value = run.settings.get(name, SETTINGS[name].default if name in SETTINGS else None)
    if value is not None:
        return value
    return run.resolved.get("height" if name == "image_size" else name)


def _importance(name: str) -> tuple[int, int]:
    """Return a key by which settings are sorted, the most telling first."""
    if name in _TELLING:
        return 0, _TELLING.index(name)
    is_seldom = name in _LESS_TELLING or (name in SETTINGS and SETTINGS[name].group in _SELDOM_TELLING)
    return (2 if is_seldom else 1), 0


def comparable_setting(value: Any) -> str:
    """Return a text that is the same for values that are the same setting."""
    # JSON makes lists of tuples, and may make integers of floats.
    if type(value) in (int, float):
        return f"{float(value)!r}"
    return repr(list(value) if isinstance(value, tuple) else value)


def table_lines(runs: Sequence[RunSummary], names: Sequence[str], now_s: float, width: int | None) -> list[str]:
    """Return the lines of the table, a title line first, at most `width` characters wide; None for as wide as needed.

    If not all columns fit, names are shortened and the least important columns are left out, which a last line names.
    """
    columns = _columns(runs, now_s)
    longest = max(map(len, names))
    left_out: list[_Column] = []
    if width is not None:
        least = min(longest, _LEAST_NAME_WIDTH)
        while columns and least + sum(_GAP + column.width for column in columns) > width:
            left_out.append(max(columns, key=lambda column: column.rank))
            columns.remove(left_out[-1])
        longest = min(longest, max(1, width - sum(_GAP + column.width for column in columns)))
        names = shorten_names(names, longest)
    name_column = _Column("run", list(names), 0)
    cells = [column.lines(max(column.width, longest * (column is name_column))) for column in [name_column, *columns]]
    lines = [(" " * _GAP).join(row).rstrip()[:width] for row in zip(*cells, strict=True)]
    if width is not None and left_out:
        titles = ", ".join(column.title for column in sorted(left_out, key=lambda column: column.rank))
        lines += textwrap.wrap(f"no room for: {titles}", width)
    return lines


def _columns(runs: Sequence[RunSummary], now_s: float) -> list[_Column]:
    """Return the columns beside the names, in the order in which they are shown."""

    def column(title: str, rank: float, cell: Callable[[RunSummary], str], *, is_number: bool = True) -> _Column:
        return _Column(title, [cell(run) for run in runs], rank, is_number)

    differing = differing_settings(runs)
    by_importance = sorted(differing, key=_importance)
    settings = []
    for name in differing:
        rank = dict(zip(by_importance, _SETTING_RANKS, strict=False)).get(name, _LEAST_RANK + by_importance.index(name))
        texts = [_setting_text(setting_of(run, name)) if run.settings else "-" for run in runs]
        settings.append(_Column(name, texts, rank=rank))
    # A metric that all runs have is in the titles, else each cell names its own.
    metrics = {run.best_metric for run in runs if run.best_metric is not None}
    of_metric = f" {parse_metric(*metrics).title}" if len(metrics) == 1 else ""
    found = [
        column("state", 1, lambda run: run.state, is_number=False),
        column("step", 2, _step_text),
        column("loss", 3, lambda run: "-" if run.loss is None else f"{run.loss:.4f}"),
        column(f"best{of_metric}", 4, lambda run: _number_text(run, run.best_value, is_named=not of_metric)),
        column(f"last{of_metric}", 4.5, lambda run: _number_text(run, run.last_value, is_named=not of_metric)),
        column("images/s", _SPEED_RANK, lambda run: "-" if run.images_per_s is None else f"{run.images_per_s:,.0f}"),
        column(
            "duration", _DURATION_RANK, lambda run: "-" if run.duration_s is None else duration_text(run.duration_s)
        ),
        column("changed", _AGE_RANK, lambda run: _age_text(run.changed_s, now_s)),
        *settings,
    ]
    # A column in which no run has anything says nothing.
    return [each for each in found if set(each.cells) != {"-"}]


def _step_text(run: RunSummary) -> str:
    if run.step is None and run.steps is None:
        return "-"
    return f"{run.step or 0}" + ("" if run.steps is None else f"/{run.steps}")


def _number_text(run: RunSummary, value: float | None, *, is_named: bool) -> str:
    """Return a number of the metric by which a run compares its evaluations."""
    if value is None or run.best_metric is None:
        return "-"
    metric = parse_metric(run.best_metric)
    return f"{metric.title} {value_text(metric, value)}" if is_named else value_text(metric, value)


def _age_text(changed_s: float | None, now_s: float) -> str:
    if changed_s is None or not math.isfinite(changed_s):
        return "-"
    words = duration_text(now_s - changed_s).split(" ")
    return f"{words[0]} {words[1]} ago"  # one unit is enough


def _setting_text(value: Any) -> str:
    """Return a setting's value in a few characters."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(map(_setting_text, value))
    text = f"{value:g}" if isinstance(value, float) else printable_line(str(value))
    return without_middle(text, _LONGEST_SETTING)
