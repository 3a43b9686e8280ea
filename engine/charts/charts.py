"""Charts of lines over steps: their axes, and the places of what `chart.html` draws.

Lines differ in colour and dashes, carry their labels, and stand beside their last values as text. Must not
know: runs, markup.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from loopfeed.engine.charts.number_text import short
from loopfeed.engine.records.loss_log import Floats
from loopfeed.engine.settings import LARGEST_FLOAT32
from loopfeed.preprocess.quantities import quantity, round_numbers

_WIDE, _HIGH = 2000, 1000  # the units of paths, which the browser stretches to the size of the chart
_CUT_FACTOR, _CUT_PERCENTILE = 3.0, 98.0
_TABLE_ROWS = 12
_MOST_DOTS = 40
_LABEL_HEIGHT = 0.075  # of the height of a chart
_LABEL_COLUMNS = 12  # labels in the same one of these must be moved apart
_NUM_STYLES = 6  # colours and dashes of the style sheet


@dataclass(frozen=True)
class Axis:
    """A linear axis from `low` to `high`, with `num_cut` values above it, which are drawn at its upper end."""

    low: float
    high: float
    ticks: Sequence[float]
    num_cut: int = 0

    def place(self, values: Floats) -> Floats:
        """Return values as fractions of the axis, 0 … 1; values outside are moved to its ends."""
        with np.errstate(over="ignore"):  # a value that no float32 has, on a narrow axis
            return np.clip((values - self.low) / (self.high - self.low), 0, 1)


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a chart."""

    name: str  # its name in the legend
    label: str  # what is written at its end, short
    x: Floats  # [n], its points; a NaN interrupts it
    y: Floats
    index: int  # its place among the colours and dashes, which repeat
    band: tuple[Floats, Floats] | None = None  # lowest and highest value around each point, [n] each; None for none
    is_faint: bool = False  # whether it is drawn thinly, behind the others
    is_marked: bool = False  # whether its points are drawn as dots

    @property
    def style(self) -> int:
        """The number of its classes of the style sheet."""
        return self.index % _NUM_STYLES

    @property
    def last(self) -> str:
        """Its last value as text."""
        values = self.y[np.isfinite(self.y)]
        return _plain(values[-1]) if len(values) else "–"

    @property
    def sample(self) -> list[tuple[str, str]]:
        """Some of its points as text."""
        places = np.unique(np.linspace(0, len(self.x) - 1, min(_TABLE_ROWS, len(self.x))).round().astype(int))
        return [(f"{self.x[at]:,.0f}", _plain(self.y[at])) for at in places]

    @property
    def pieces(self) -> list[slice]:
        """The stretches without NaN."""
        finite = np.concatenate([[False], np.isfinite(self.y), [False]])
        edges = np.flatnonzero(finite[1:] != finite[:-1]).tolist()
        return [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


@dataclass(frozen=True, eq=False)
class Chart:
    """A chart of lines over steps."""

    title: str  # what it shows
    lines: Sequence[Line]  # at least one
    unit: str = ""  # of the values, "" for none
    from_zero: bool = True  # whether the axis begins at 0 if no value is negative
    most: float | None = None  # the largest possible value
    note: str = ""  # a sentence below it

    @property
    def last(self) -> float:
        """The last step of all lines."""
        return max((float(line.x[-1]) for line in self.lines if len(line.x)), default=0.0)

    @cached_property
    def steps(self) -> Axis:
        """The axis of the steps, from 0."""
        high = max(self.last, 1.0)
        return Axis(0.0, high, [tick for tick in round_numbers(0.0, high, 4) if tick == int(tick)])

    @cached_property
    def values(self) -> Axis:
        """The axis of the values."""
        bands = [edge for line in self.lines for edge in line.band or ()]
        return value_axis([*(line.y for line in self.lines), *bands], from_zero=self.from_zero, most=self.most)

    @property
    def summary(self) -> str:
        """What it says to those who do not see it."""
        names = ", ".join(f"{line.name}: {line.last}" for line in self.lines)
        return f"{self.title} over steps; last values: {names}. The arrow keys move through the steps."

    @property
    def notes(self) -> str:
        """The sentences below it."""
        num_cut, high = self.values.num_cut, short(self.values.high)
        verb = "is" if num_cut == 1 else "are"
        cut = f"{quantity(num_cut, 'value')} above {high} {verb} drawn at the upper edge." if num_cut else ""
        return " ".join(filter(None, (self.note, cut)))

    @property
    def value_labels(self) -> list[tuple[str, float]]:
        """The text of each tick of the values, and its place from the top, in percent."""
        ticks = self.values.ticks
        between = ticks[1] - ticks[0] if len(ticks) > 1 else 0.0
        places = 100 * (1 - self.values.place(np.array(ticks)))
        return [(short(tick, between), place) for tick, place in zip(ticks, places.tolist(), strict=True)]

    @property
    def step_labels(self) -> list[tuple[str, float]]:
        """The text of each tick of the steps, and its place from the left, in percent."""
        places = 100 * self.steps.place(np.array(self.steps.ticks))
        return [(short(tick), place) for tick, place in zip(self.steps.ticks, places.tolist(), strict=True)]

    def path(self, line: Line) -> str:
        """Return a path through the points; a point between two gaps is drawn as a short stroke."""
        parts = [self._scaled(line.x[piece], line.y[piece]) for piece in line.pieces]
        return "".join(f"M{points[0]}h1" if len(points) == 1 else f"M{'L'.join(points)}" for points in parts)

    def area(self, line: Line) -> str:
        """Return a path around the band of a line, "" without one."""
        if line.band is None:
            return ""
        low, high = line.band
        parts = [(line.x[piece], low[piece], high[piece]) for piece in line.pieces]
        return "".join(
            f"M{'L'.join([*self._scaled(x, top), *self._scaled(x, bottom)[::-1]])}z" for x, bottom, top in parts
        )

    def _scaled(self, x: Floats, y: Floats) -> list[str]:
        across, down = _WIDE * self.steps.place(x), _HIGH * (1 - self.values.place(y))
        return [f"{left:.0f} {top:.0f}" for left, top in zip(across.tolist(), down.tolist(), strict=True)]

    def dots(self, line: Line) -> str:
        """Return a path with a stroke of no length at some of the points, whose round ends are a dot."""
        known = np.flatnonzero(np.isfinite(line.y))
        known = known[:: max(1, -(-len(known) // _MOST_DOTS))]
        return "".join(f"M{point}h0" for point in self._scaled(line.x[known], line.y[known]))

    @property
    def labels(self) -> list[tuple[float, float, Line]]:
        """The place of the label of each line, right of its last point, moved apart where they would overlap."""
        columns: dict[int, list[tuple[float, float, Line]]] = {}
        for line in self.lines:
            ends = np.flatnonzero(np.isfinite(line.y))[-1:]
            if line.label and len(ends):
                across, up = float(self.steps.place(line.x[ends])[0]), float(self.values.place(line.y[ends])[0])
                columns.setdefault(round(across * _LABEL_COLUMNS), []).append((1 - up, across, line))
        found = []
        for column in columns.values():
            column.sort(key=lambda place: place[0])
            tops = spread([top for top, _, _ in column])
            found += [(100 * across, 100 * top, line) for top, (_, across, line) in zip(tops, column, strict=True)]
        return found

    @property
    def room(self) -> str:
        """The classes of the style sheet that leave room for the labels at its right."""
        longest = max((len(line.label) for line in self.lines), default=0)
        return "axes" if not longest else "axes letters" if longest == 1 else "axes words"

    @property
    def points(self) -> dict[str, Any]:
        """The points of all lines, for the script of the page."""
        lines = [{"x": line.x.astype(int).tolist(), "y": [rounded(y) for y in line.y.tolist()]} for line in self.lines]
        return {"last": self.steps.high, "lines": lines}


def value_axis(values: Sequence[Floats], *, from_zero: bool, most: float | None = None) -> Axis:
    """Return an axis for values of which some can be NaN; a few very high ones do not flatten the others."""
    found = np.concatenate([*values, np.zeros(0)])
    found = found[np.abs(found) <= LARGEST_FLOAT32]
    if not len(found):
        return Axis(0.0, 1.0, (0.0, 1.0))
    low, high = float(found.min()), float(found.max())
    usual = float(np.percentile(found, _CUT_PERCENTILE))
    if most is None and len(found) >= 50 and high - low > _CUT_FACTOR * (usual - low) > 0:
        high = low + 1.5 * (usual - low)
    if from_zero and low >= 0:
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # too close for round numbers between them
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if high else (0.0, 1.0)
    ticks = round_numbers(low, high, 5)
    if len(ticks) > 1:
        between = ticks[1] - ticks[0]
        if low:
            low = min(low, float(f"{math.floor(low / between + 1e-9) * between:.12g}"))
        high = max(high, float(f"{math.ceil(high / between - 1e-9) * between:.12g}"))
    if most is not None:
        high = min(high, most)
    return Axis(low, high, round_numbers(low, high, 5), int((found > high).sum()))


def spread(places: Sequence[float]) -> list[float]:
    """Return places 0 … 1 in ascending order, moved so far apart that labels do not overlap, all within 0 … 1."""
    between = min(_LABEL_HEIGHT, 1 / max(len(places), 1))
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + between) if moved else place)
    for index in reversed(range(len(moved))):
        limit = 1.0 if index == len(moved) - 1 else moved[index + 1] - between
        moved[index] = min(moved[index], limit)
    return moved


def rounded(value: float) -> float | int | None:
    """Return a number with five significant digits, as the page's script gets it; None if it is NaN or infinite."""
    if not math.isfinite(value):
        return None
    number = float(f"{value:.5g}")
    return int(number) if number == int(number) and abs(number) < 2**53 else number


def _plain(value: float) -> str:
    """Return a number as the script of the page writes it."""
    return "–" if (number := rounded(float(value))) is None else json.dumps(number)
