"""Charts as one picture that needs neither a style sheet nor a script: for notebooks, and as an SVG file.

`loopfeed.engine.charts.charts` has the places of everything; the page of `report-run` draws the same charts.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from loopfeed.engine.charts.charts import Chart, Line
from loopfeed.engine.records.whole_file import write_whole

# Each is readable on a light and on a dark ground, because a picture does not know which of them it is on.
_COLOURS = ("#1f7ad1", "#d9591c", "#2a9150", "#b04fb5", "#9c7a10", "#17899a")
_DASHES = ("", "8 3", "2 3", "10 3 2 3", "14 5", "5 2 2 2 2 2")
_INK = "#808080"
_WIDTH, _HEIGHT = 640, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 70, 26, 34


@dataclass(frozen=True, eq=False)
class Figure:
    """Charts, one below another; a notebook shows them.

    Attributes:
        charts: what is drawn.
    """

    charts: Sequence[Chart]

    def __repr__(self) -> str:
        return f"Figure({', '.join(chart.title for chart in self.charts)})"

    def _repr_svg_(self) -> str:
        """Return the picture, which is what a notebook shows, no wider than its cell."""
        return self.to_svg()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to an SVG file, whole or not at all.

        Raises:
            ValueError: the name does not end in .svg.
            OSError: the file cannot be written.
        """
        if Path(path).suffix != ".svg":
            raise ValueError(f"a figure is written to an SVG file, got {path}: choose a name that ends in .svg")
        write_whole(Path(path), self.to_svg(is_fluid=False).encode())

    def to_svg(self, height: int = _HEIGHT, *, is_fluid: bool = True) -> str:
        """Return the picture as SVG.

        Args:
            height: that of one chart, in pixels.
            is_fluid: whether the picture becomes smaller with the page that it is in; not all programs read this.
        """
        step, style = height + _TOP + _BOTTOM, ' style="max-width:100%;height:auto"' * is_fluid
        total = max(step * len(self.charts), 1)
        parts = [part for number, chart in enumerate(self.charts) for part in _draw(chart, number * step, height)]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {total}" width="{_WIDTH}" height="{total}" '
            f'font-family="system-ui,sans-serif" font-size="12" fill="{_INK}"{style} '
            f'role="img" aria-label="{escape(self._summary)}">{"".join(parts)}</svg>'
        )

    @property
    def _summary(self) -> str:
        return "; ".join(
            f"{chart.title} over steps; last values: " + ", ".join(f"{line.name}: {line.last}" for line in chart.lines)
            for chart in self.charts
        )


def _draw(chart: Chart, top: float, height: int) -> Iterator[str]:
    across, y0 = _WIDTH - _LEFT - _RIGHT, top + _TOP
    unit = f" ({chart.unit})" if chart.unit else ""
    yield f'<text x="{_LEFT}" y="{top + 16:g}" font-weight="600">{escape(chart.title + unit)}</text>'
    yield from _legend(chart, top + 16)
    for text, part in chart.value_labels:
        y = y0 + part / 100 * height
        yield f'<text x="{_LEFT - 6}" y="{y:.1f}" dy=".32em" text-anchor="end">{escape(text)}</text>'
        yield f'<path d="M{_LEFT} {y:.1f}h{across}" stroke="{_INK}" stroke-opacity=".3"/>'
    for text, part in chart.step_labels:
        x = _LEFT + part / 100 * across
        yield f'<text x="{x:.1f}" y="{y0 + height + 15:g}" text-anchor="middle">{escape(text)}</text>'
    yield f'<text x="{_LEFT + across / 2:g}" y="{y0 + height + 29:g}" text-anchor="middle">step</text>'
    yield (
        f'<svg x="{_LEFT}" y="{y0:g}" width="{across}" height="{height}" viewBox="0 0 2000 1000" '
        'preserveAspectRatio="none" overflow="visible" fill="none" stroke-linejoin="round" stroke-width="2">'
    )
    for line in sorted(chart.lines, key=lambda each: not each.is_faint):
        yield from _strokes(chart, line)
    yield "</svg>"
    for left, above, line in chart.labels:
        x, y = _LEFT + left / 100 * across + 8, y0 + above / 100 * height
        yield f'<text x="{x:.1f}" y="{y:.1f}" dy=".32em" fill="{_colour(line)}">{escape(line.label)}</text>'


def _legend(chart: Chart, y: float) -> Iterator[str]:
    """Yield the names and the last values of the lines, right-aligned above the chart."""
    words = [f'<tspan fill="{_colour(line)}" dx="12">— {escape(line.name)} {line.last}</tspan>' for line in chart.lines]
    yield f'<text x="{_WIDTH - _RIGHT}" y="{y:g}" text-anchor="end">{"".join(words)}</text>'


def _strokes(chart: Chart, line: Line) -> Iterator[str]:
    how = f'stroke="{_colour(line)}" vector-effect="non-scaling-stroke"'
    dashes = _DASHES[line.style]
    faint = ' stroke-width="1" stroke-opacity=".45"' if line.is_faint else ""
    if line.pieces:
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        yield f'<path d="{chart.path(line)}" {how}{dashed}{faint}/>'
    if line.is_marked:
        yield f'<path d="{chart.dots(line)}" {how} stroke-width="6" stroke-linecap="round"/>'


def _colour(line: Line) -> str:
    return _COLOURS[line.style]
