"""Charts of lines as SVG, which the browser stretches to the width of the page.

Lines differ in colour, dashes and markers, carry their labels, and stand beside their last values as text. Must not
know: runs.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loopfeed.engine.records.loss_log import Floats
from loopfeed.engine.report_page.axes import Axis, steps_axis, value_axis
from loopfeed.engine.report_page.markup import Html, data_block, folded, join, paragraph, table, tag
from loopfeed.engine.report_page.number_text import short
from loopfeed.preprocess.quantities import quantity

NUM_STYLES = 6
"""Number of colours, dash patterns and markers, which then repeat."""
_WIDE, _HIGH = 2000, 1000
_TABLE_ROWS = 12
_MOST_MARKERS = 40
_LABEL_HEIGHT = 0.075  # of the height of a chart
_LABEL_COLUMNS = 12  # labels in the same one of these must be moved apart
# As <path> data in pixels around the point: disc, square, triangle, diamond, cross, bar.
_MARKERS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
    "M-3.2 -3.2h6.4v6.4h-6.4z",
    "M0 -4.2L4 3.2H-4z",
    "M0 -4.6L4.6 0L0 4.6L-4.6 0z",
    "M-3.6 -3.6L3.6 3.6M3.6 -3.6L-3.6 3.6",
    "M0 -4.5V4.5",
)


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a chart.

    Attributes:
        name: its name in the legend.
        label: what is written at its end, short.
        x, y: [n], its points; a NaN interrupts it.
        style: which colour, dashes and markers, from 0.
        band: lowest and highest value around each point, [n] each; None for none.
        is_faint: whether it is drawn thinly, behind the others.
        is_marked: whether its points are marked.
    """

    name: str
    label: str
    x: Floats
    y: Floats
    style: int
    band: tuple[Floats, Floats] | None = None
    is_faint: bool = False
    is_marked: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of lines over steps.

    Attributes:
        title: what it shows.
        lines: at least one.
        unit: of the values, "" for none.
        from_zero: whether the axis begins at 0.
        most: the largest possible value.
        note: a sentence below it.
    """

    title: str
    lines: Sequence[Line]
    unit: str = ""
    from_zero: bool = True
    most: float | None = None
    note: str = ""


def draw(chart: Chart) -> Html:
    """Return a figure with the chart, its legend with the last values, and a table of some values."""
    bands = [edge for line in chart.lines if line.band is not None for edge in line.band]
    axis = value_axis([*(line.y for line in chart.lines), *bands], from_zero=chart.from_zero, most=chart.most)
    steps = steps_axis(max((float(line.x[-1]) for line in chart.lines if len(line.x)), default=1.0))
    notes = [chart.note] if chart.note else []
    if axis.num_cut:
        verb = "is" if axis.num_cut == 1 else "are"
        notes.append(f"{quantity(axis.num_cut, 'value')} above {short(axis.high)} {verb} drawn at the upper edge.")
    return tag(
        "figure",
        tag("figcaption", tag("b", chart.title), f" ({chart.unit})" if chart.unit else None),
        _legend(chart),
        tag("div", _y_labels(axis), _plot(chart, axis, steps), tag("span"), _x_labels(steps), class_=_gutter(chart)),
        paragraph(" ".join(notes), class_="note") if notes else None,
        _values(chart),
        _data(chart, steps),
        class_="chart",
    )


def _gutter(chart: Chart) -> str:
    """Return the classes of the chart, which leave room for the labels at its right."""
    longest = max((len(line.label) for line in chart.lines), default=0)
    return "axes" if not longest else "axes letters" if longest == 1 else "axes words"


def _legend(chart: Chart) -> Html:
    """Return the list of the lines, each with its last value, which the page's script replaces by that at a step."""
    last = max((float(line.x[-1]) for line in chart.lines if len(line.x)), default=0.0)
    items = [
        tag("li", _swatch(line), tag("span", line.name), " ", tag("output", _last_value(line), class_="value"))
        for line in chart.lines
    ]
    step = tag("li", "step ", tag("output", f"{last:,.0f}", class_="step"))
    return tag("ul", step, items, class_="legend")


def _swatch(line: Line) -> Html:
    return tag(
        "svg",
        tag("line", x1=0, x2=30, y1=6, y2=6, class_=_line_class(line)),
        tag("path", d=_MARKERS[line.style % NUM_STYLES], transform="translate(15 6)", class_=_marker_class(line))
        if line.is_marked
        else None,
        width=30,
        height=12,
        aria_hidden="true",
    )


def _marker_class(line: Line) -> str:
    return f"m m{line.style % NUM_STYLES}"


def _last_value(line: Line) -> str:
    values = line.y[np.isfinite(line.y)]
    return "–" if not len(values) else _plain(float(values[-1]))


def rounded(value: float) -> float | int | None:
    """Return a number with five significant digits, as the page's script gets it; None if it is NaN or infinite."""
    if not math.isfinite(value):
        return None
    number = float(f"{value:.5g}")
    return int(number) if number == int(number) and abs(number) < 2**53 else number


def _plain(value: float) -> str:
    """Return a number as the script of the page writes it."""
    return "–" if (number := rounded(value)) is None else json.dumps(number)


def _y_labels(axis: Axis) -> Html:
    places = axis.place(np.array(axis.ticks))
    between = axis.ticks[1] - axis.ticks[0] if len(axis.ticks) > 1 else 0.0
    labels = (
        tag("text", short(tick, between), x="100%", y=f"{100 * (1 - place):.2f}%", dy="0.32em", text_anchor="end")
        for tick, place in zip(axis.ticks, places, strict=True)
    )
    return tag("svg", *labels, class_="yaxis", aria_hidden="true")


def _x_labels(axis: Axis) -> Html:
    labels = []
    for tick, place in zip(axis.ticks, axis.place(np.array(axis.ticks)), strict=True):
        anchor = "start" if place < 0.03 else "end" if place > 0.96 else "middle"
        labels.append(tag("text", short(tick), x=f"{100 * place:.2f}%", y=14, text_anchor=anchor))
    labels.append(tag("text", "step", x="50%", y=30, text_anchor="middle"))
    return tag("svg", *labels, class_="xaxis", aria_hidden="true")


def _plot(chart: Chart, axis: Axis, steps: Axis) -> Html:
    grid = (
        tag("line", x1=0, x2="100%", y1=f"{100 * (1 - place):.2f}%", y2=f"{100 * (1 - place):.2f}%", class_="grid")
        for place in axis.place(np.array(axis.ticks))
    )
    curves = tag(
        "svg",
        *(_band(line, axis, steps) for line in chart.lines),
        *(_path(line, axis, steps) for line in sorted(chart.lines, key=lambda line: not line.is_faint)),
        viewBox=f"0 0 {_WIDE} {_HIGH}",
        preserveAspectRatio="none",
        width="100%",
        height="100%",
    )
    names = ", ".join(f"{line.name}: {_last_value(line)}" for line in chart.lines)
    return tag(
        "svg",
        *grid,
        curves,
        *(_markers(line, axis, steps) for line in chart.lines if line.is_marked),
        *_end_labels(chart, axis, steps),
        tag("line", x1=0, x2=0, y1=0, y2="100%", class_="cursor"),
        class_="plot",
        role="img",
        tabindex="0",
        aria_label=f"{chart.title} over steps; last values: {names}. The arrow keys move through the steps.",
    )


def _scaled(x: Floats, y: Floats, axis: Axis, steps: Axis) -> tuple[list[int], list[int]]:
    across, up = _WIDE * steps.place(x), _HIGH * (1 - axis.place(y))
    return np.rint(across).astype(int).tolist(), np.rint(up).astype(int).tolist()


def _path(line: Line, axis: Axis, steps: Axis) -> Html | None:
    """Return a line through the points; a point between two gaps is drawn as a short stroke."""
    parts: list[str] = []
    for start, stop in _pieces(line.y):
        across, up = _scaled(line.x[start:stop], line.y[start:stop], axis, steps)
        points = [f"{left} {top}" for left, top in zip(across, up, strict=True)]
        parts.append(f"M{points[0]}h1" if len(points) == 1 else f"M{'L'.join(points)}")
    return tag("path", d="".join(parts), class_=_line_class(line)) if parts else None


def _line_class(line: Line) -> str:
    return f"{'f' if line.is_faint else 'l'} l{line.style % NUM_STYLES}"


def _pieces(y: Floats) -> list[tuple[int, int]]:
    """Return start and stop of each stretch without NaN."""
    finite = np.concatenate([[False], np.isfinite(y), [False]])
    edges = np.flatnonzero(finite[1:] != finite[:-1])
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _band(line: Line, axis: Axis, steps: Axis) -> Html | None:
    if line.band is None:
        return None
    low, high = line.band
    parts = []
    for start, stop in _pieces(low):
        across, down = _scaled(line.x[start:stop], low[start:stop], axis, steps)
        _, up = _scaled(line.x[start:stop], high[start:stop], axis, steps)
        there = [f"{left} {top}" for left, top in zip(across, up, strict=True)]
        back = [f"{left} {top}" for left, top in zip(across[::-1], down[::-1], strict=True)]
        parts.append(f"M{'L'.join(there + back)}z")
    return tag("path", d="".join(parts), class_=f"b b{line.style % NUM_STYLES}") if parts else None


def _markers(line: Line, axis: Axis, steps: Axis) -> Html:
    """Return markers at no more than some of the points, each in an SVG of its own, which is not stretched."""
    places = np.flatnonzero(np.isfinite(line.y))
    places = places[:: max(1, -(-len(places) // _MOST_MARKERS))]
    across, up = 100 * steps.place(line.x[places]), 100 * (1 - axis.place(line.y[places]))
    shape = tag("path", d=_MARKERS[line.style % NUM_STYLES], class_=_marker_class(line))
    return join(
        *(
            tag("svg", shape, x=f"{left:.2f}%", y=f"{top:.2f}%", overflow="visible", width=1, height=1)
            for left, top in zip(across, up, strict=True)
        )
    )


def _end_labels(chart: Chart, axis: Axis, steps: Axis) -> list[Html]:
    """Return the labels of the lines, to the right of their last points, moved apart where they would overlap."""
    columns: dict[int, list[tuple[float, float, Line]]] = {}
    for line in chart.lines:
        places = np.flatnonzero(np.isfinite(line.y))
        if line.label and len(places):
            last = places[-1:]
            across = float(steps.place(line.x[last])[0])
            place = (float(1 - axis.place(line.y[last])[0]), across, line)
            columns.setdefault(round(across * _LABEL_COLUMNS), []).append(place)
    return [label for column in columns.values() for label in _column_of_labels(column)]


def _column_of_labels(found: list[tuple[float, float, Line]]) -> list[Html]:
    """Return the labels of lines that end near the same step; `found` has their places, down and across."""
    found.sort(key=lambda each: each[0])
    return [
        tag(
            "text",
            line.label,
            x=f"{100 * across:.2f}%",
            y=f"{100 * top:.2f}%",
            dx=8,
            dy="0.32em",
            class_=f"label t{line.style % NUM_STYLES}",
        )
        for top, (_, across, line) in zip(spread([top for top, _, _ in found]), found, strict=True)
    ]


def spread(places: Sequence[float]) -> list[float]:
    """Return ascending places in 0 … 1, moved apart to `_LABEL_HEIGHT` if there is room for all."""
    between = min(_LABEL_HEIGHT, 1 / max(len(places), 1))
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + between) if moved else place)
    for index in reversed(range(len(moved))):
        limit = 1.0 if index == len(moved) - 1 else moved[index + 1] - between
        moved[index] = min(moved[index], limit)
    return moved


def _values(chart: Chart) -> Html:
    """Return a folded table of some points of each line."""
    blocks = []
    for line in chart.lines:
        places = np.unique(np.linspace(0, len(line.x) - 1, min(_TABLE_ROWS, len(line.x))).round().astype(int))
        rows = [(f"{line.x[at]:,.0f}", _plain(float(line.y[at]))) for at in places]
        caption = f"{chart.title}: {line.name}" + (f" ({chart.unit})" if chart.unit else "")
        blocks.append(table(("step", line.name), rows, caption=caption, numbers=(0, 1)))
    return folded("Some values as a table", tag("div", blocks, class_="row"))


def _data(chart: Chart, steps: Axis) -> Html:
    """Return the points of all lines for the page's script."""
    lines = [{"x": line.x.astype(int).tolist(), "y": [rounded(y) for y in line.y.tolist()]} for line in chart.lines]
    return data_block({"last": steps.high, "lines": lines})
