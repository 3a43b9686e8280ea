"""Text charts of loss curves, drawn by functions that convert numbers to lines of characters.

Owns the positions of the dots, the axes, the ticks and the two character sets. Must not know: files, terminals,
colours, jax.
Letters: R rows and C columns of *dots*; a braille character is 4 dots high and 2 wide, an ASCII character is 1 by 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Ink = Literal["axis", "raw", "smoothed", "broken", "run 1", "run 2", "run 3", "run 4", "run 5", "run 6"]
Floats = npt.NDArray[np.float64]

# Unicode 15, chapter "Braille Patterns": U+2800 plus one bit per dot, the fourth row added after the first three.
_BRAILLE_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
BRAILLE_BLANK = 0x2800
_MIN_PLOT_WIDTH = 8  # below this width, the loss axis is left out
_MIN_AXIS_HEIGHT = 4  # below this height, the step axis is left out
_ROWS_PER_TICK = 4


@dataclass(frozen=True, eq=False)
class LossCurve:
    """A loss curve of n points in order of step; one point can represent several steps."""

    step: Floats  # [n], from 0
    low: Floats  # [n], the lowest finite loss of the point; NaN if it has none
    high: Floats  # [n], the highest finite loss of the point; NaN if it has none
    smoothed: Floats  # [n], NaN if unknown
    num_broken: npt.NDArray[np.int64]  # [n], number of NaN or infinite losses of the point


class Span(NamedTuple):
    """A sequence of adjacent characters of the same kind, which the caller prints in the same colour."""

    text: str
    ink: Ink


@dataclass(frozen=True)
class Glyphs:
    """The character set of a chart; each character is one column wide."""

    vertical: str
    tick: str
    corner: str
    horizontal: str
    step_tick: str
    broken: str
    braille: bool


UNICODE_GLYPHS = Glyphs("│", "┤", "└", "─", "┬", "×", braille=True)
ASCII_GLYPHS = Glyphs("|", "+", "+", "-", "+", "x", braille=False)


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic scale that maps `low` to 0 (bottom) and `high` to 1 (top).

    `low` is less than `high`, and is positive if `log` is true.
    """

    low: float
    high: float
    log: bool

    def unit(self, losses: Floats) -> Floats:
        """Return the position of each loss, clipped to 0 … 1; NaN if the loss cannot be shown on this scale."""
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            if self.log:
                # Separate logarithms, because the quotient overflows if losses span all of float64.
                bottom, top = math.log(self.low), math.log(self.high)
                part = np.where(losses > 0, (np.log(losses) - bottom) / (top - bottom), np.nan)
            else:
                # Halves, because high - low overflows for losses near the ends of float64.
                part = (losses / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return np.clip(part, 0.0, 1.0)


def draw_chart(
    curve: LossCurve, width: int, height: int, *, log_scale: bool = False, glyphs: Glyphs = UNICODE_GLYPHS
) -> list[list[Span]]:
    """Draw a loss curve with both axes: the range from `low` to `high` of each point, overlaid with the smoothed curve.

    Step s of a range s0 … s1 falls on dot column `floor((s - s0 + ½) · C / (s1 - s0 + 1))`; the highest loss falls on
    the top row of dots, the lowest on the bottom one. Columns with a NaN or infinite loss (or, with `log_scale`,
    one that is not positive) have a mark on the step axis.

    Args:
        curve: the points.
        width: columns of characters, at least 1.
        height: lines, at least 1. Narrow charts omit the loss axis, low ones the step axis.
        log_scale: whether the loss axis is logarithmic.
        glyphs: `UNICODE_GLYPHS` or `ASCII_GLYPHS`.

    Returns:
        Exactly `height` lines of at most `width` characters.

    Raises:
        ValueError: if width or height is below 1.
    """
    if width < 1 or height < 1:
        raise ValueError(f"a chart needs at least 1 × 1 characters, got {width} × {height}; widen the terminal")
    scale = scale_of(curve, log_scale)
    if scale is None:
        return blank_chart(width, height, "no finite loss yet" if len(curve.step) else "no loss yet")
    plot = lay_out(scale, width, height)
    raw, smoothed = _dots(curve, scale, plot.width, plot.height, glyphs)
    return with_axes(_characters(raw, smoothed, glyphs), curve, scale, plot, height, glyphs)


class Plot(NamedTuple):
    """The size of the area between the axes, in characters, and the loss axis beside it.

    Attributes:
        width, height: of the area.
        gutter: columns of the loss axis with its labels, 0 without one.
        ticks: labels of the loss axis by line.
    """

    width: int
    height: int
    gutter: int
    ticks: dict[int, str]


def lay_out(scale: Scale, width: int, height: int) -> Plot:
    """Divide `width` × `height` characters between the curves and the axes."""
    plot_height = height - 2 if height >= _MIN_AXIS_HEIGHT else height
    ticks = _loss_ticks(scale, plot_height)
    gutter = max((len(label) for label in ticks.values()), default=0) + 1
    if width - gutter < _MIN_PLOT_WIDTH:
        ticks, gutter = {}, 0
    return Plot(width - gutter, plot_height, gutter, ticks)


def with_axes(
    plot_lines: list[list[Span]], curve: LossCurve, scale: Scale, plot: Plot, height: int, glyphs: Glyphs
) -> list[list[Span]]:
    """Return the lines of the area between the axes together with the axes, `height` lines; `curve` has all steps."""
    lines = []
    for row, plot_line in enumerate(plot_lines):
        label = plot.ticks.get(row, "")
        edge = label.rjust(plot.gutter - 1) + (glyphs.tick if label else glyphs.vertical) if plot.gutter else ""
        lines.append([Span(edge, "axis"), *plot_line])
    if plot.height < height:
        lines += _step_axis(curve, scale, plot.width, plot.gutter, glyphs)
    return lines


def blank_chart(width: int, height: int, message: str) -> list[list[Span]]:
    """Return the lines of a chart that shows only a message."""
    middle = message[:width].center(width)
    return [[Span(middle if row == height // 2 else "", "axis")] for row in range(height)]


def scale_of(curve: LossCurve, log_scale: bool) -> Scale | None:
    """Return the scale that covers every drawable loss; None if no loss can be drawn."""
    values = np.concatenate((curve.low, curve.high, curve.smoothed))
    values = values[np.isfinite(values)]
    if log_scale:
        values = values[values > 0]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if log_scale and math.log(low) == math.log(high):
        low, high = low / 2 or low, high * 2
    elif low / 2 == high / 2:
        pad = abs(low) * 0.05 or 1.0
        low, high = low - pad, high + pad
    limit = float(np.finfo(np.float64).max)
    return Scale(max(low, -limit), min(high, limit), log_scale)


def columns_of(steps: Floats, curve: LossCurve, num_columns: int) -> npt.NDArray[np.int64]:
    """Return the column of each step [n], of columns that cover the steps of `curve`."""
    first, last = curve.step[0], curve.step[-1]
    columns = np.floor((steps - first + 0.5) * (num_columns / (last - first + 1)))
    return np.clip(columns, 0, num_columns - 1).astype(np.int64)


def _rows_of(unit: Floats, num_rows: int) -> npt.NDArray[np.int64]:
    """Return the row of each position, from 0 at the top to num_rows - 1 at the bottom; positions must be finite."""
    return np.rint((1.0 - unit) * (num_rows - 1)).astype(np.int64)


def _dots(
    curve: LossCurve, scale: Scale, plot_width: int, plot_height: int, glyphs: Glyphs
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return two bool arrays [R, C]: the dots of the raw losses and the dots of the smoothed curve."""
    R, C = (plot_height * 4, plot_width * 2) if glyphs.braille else (plot_height, plot_width)
    columns = columns_of(curve.step, curve, C)
    low = scale.unit(np.where(curve.low > 0, curve.low, scale.low) if scale.log else curve.low)
    high = scale.unit(curve.high)
    drawn = np.isfinite(low) & np.isfinite(high)
    tops, bottoms = np.full(C, R), np.full(C, -1)
    np.minimum.at(tops, columns[drawn], _rows_of(high[drawn], R))
    np.maximum.at(bottoms, columns[drawn], _rows_of(low[drawn], R))
    rows = np.arange(R)[:, None]
    raw = (rows >= tops) & (rows <= bottoms)
    return raw, smoothed_dots(columns, scale.unit(curve.smoothed), R, C)


def smoothed_dots(columns: npt.NDArray[np.int64], unit: Floats, R: int, C: int) -> npt.NDArray[np.bool_]:
    """Return the dots [R, C] of an unbroken line through the mean position in each column."""
    known = np.isfinite(unit)
    if not known.any():
        return np.zeros((R, C), np.bool_)
    num = np.bincount(columns[known], minlength=C)
    filled = np.flatnonzero(num)
    means = np.bincount(columns[known], unit[known], minlength=C)[filled] / num[filled]
    reach = np.arange(filled[0], filled[-1] + 1)
    line = _rows_of(np.interp(reach, filled, np.clip(means, 0.0, 1.0)), R)
    before = np.append(line[:1], line[:-1])
    # Each column starts after the previous column's row, so that steep parts have neither gaps nor doubled dots.
    start = np.where(line > before, before + 1, line)
    stop = np.where(line < before, before - 1, line)
    rows = np.arange(R)[:, None]
    dots = np.zeros((R, C), np.bool_)
    dots[:, reach] = (rows >= start) & (rows <= stop)
    return dots


def _characters(raw: npt.NDArray[np.bool_], smoothed: npt.NDArray[np.bool_], glyphs: Glyphs) -> list[list[Span]]:
    """Convert dots to lines of spans; a character that contains part of the smoothed curve omits the raw losses."""
    if glyphs.braille:
        curve_codes = braille_cells(smoothed)
        bright = curve_codes > 0
        codes = np.where(bright, curve_codes, braille_cells(raw))
        texts = [[chr(BRAILLE_BLANK + code) if code else " " for code in line] for line in codes.tolist()]
    else:
        bright = smoothed
        texts = [[" .**"[code] for code in line] for line in (raw + 2 * smoothed).tolist()]
    inks: list[list[Ink]] = [["smoothed" if each else "raw" for each in line] for line in bright.tolist()]
    return [spans_of(text, line_inks) for text, line_inks in zip(texts, inks, strict=True)]


def braille_cells(dots: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return the number of the braille character of each 4 × 2 dots [R, C], counted from `BRAILLE_BLANK`."""
    R, C = dots.shape
    return np.einsum("rich,ih->rc", dots.reshape(R // 4, 4, C // 2, 2).astype(np.int64), _BRAILLE_BITS)


def spans_of(characters: Sequence[str], inks: Sequence[Ink]) -> list[Span]:
    """Join adjacent characters of the same ink, so that the colour changes once per span, not per character."""
    spans: list[Span] = []
    start = 0
    for index in range(1, len(characters) + 1):
        if index == len(characters) or inks[index] != inks[start]:
            spans.append(Span("".join(characters[start:index]), inks[start]))
            start = index
    return spans


def _step_axis(curve: LossCurve, scale: Scale, plot_width: int, gutter: int, glyphs: Glyphs) -> list[list[Span]]:
    """Return two lines: the step axis, with ticks and with marks for losses that cannot be drawn, and its labels."""
    axis, labels = [glyphs.horizontal] * plot_width, [" "] * plot_width
    first, last = float(curve.step[0]), float(curve.step[-1])
    free = 0  # the first free column for a label, one blank after the previous label
    for step in _nice_values(first, last, max(2, plot_width // 16)):
        if step != int(step):
            continue
        label = f"{int(step)}"
        column = int(columns_of(np.array([step]), curve, plot_width)[0])
        start = min(max(0, column - len(label) // 2), plot_width - len(label))
        if start >= free:
            axis[column] = glyphs.step_tick
            labels[start : start + len(label)] = label
            free = start + len(label) + 1
    broken = curve.num_broken > 0
    if scale.log:
        broken |= curve.low <= 0
    inks: list[Ink] = ["axis"] * plot_width
    for column in columns_of(curve.step[broken], curve, plot_width).tolist():
        axis[column], inks[column] = glyphs.broken, "broken"
    corner = glyphs.corner.rjust(gutter) if gutter else ""
    return [[Span(corner, "axis"), *spans_of(axis, inks)], [Span(" " * gutter + "".join(labels).rstrip(), "axis")]]


def _loss_ticks(scale: Scale, plot_height: int) -> dict[int, str]:
    """Return the tick labels of the loss axis, keyed by text row; row 0 is at the top."""
    wanted = max(2, plot_height // _ROWS_PER_TICK)
    values = _log_values(scale, wanted) if scale.log else []
    if len(values) < 2:
        values = _nice_values(scale.low, scale.high, wanted)
    rows = _rows_of(scale.unit(np.array(values, np.float64)), plot_height).tolist()
    by_row = dict(zip(rows[::-1], values[::-1], strict=True))  # if values share a row, the lowest is shown
    for digits in range(6, 17):  # enough to distinguish neighbours
        ticks = {row: f"{value:z.{digits}g}" for row, value in by_row.items()}
        if len(set(ticks.values())) == len(ticks):
            break
    return ticks


def _log_values(scale: Scale, wanted: int) -> list[float]:
    """Return the values to label on a logarithmic scale.

    These are about `wanted` powers of ten or, if there are too few, all values of the form 1, 2 or 5 · 10^k.
    """
    exponents = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    values = {factor: [float(f"{factor}e{exponent}") for exponent in exponents] for factor in (1, 2, 5)}
    inside = {factor: [v for v in values[factor] if scale.low <= v <= scale.high] for factor in values}
    if len(inside[1]) >= 2 and sum(map(len, inside.values())) > wanted + 2:
        return inside[1][:: math.ceil(len(inside[1]) / (wanted + 1))]
    return sorted(value for group in inside.values() for value in group)


def _nice_values(low: float, high: float, wanted: int) -> list[float]:
    """Return up to `wanted` + 1 multiples of 1, 2 or 5 · 10^k from `low` to `high`, or both bounds if none exist."""
    span = high - low
    if not 0 < span < math.inf:
        return [low] if low == high else [low, high]
    exponent = math.floor(math.log10(span / wanted)) if span / wanted > 0 else -300
    for factor, power in ((1, 0), (2, 0), (5, 0), (1, 1), (2, 1)):
        gap = float(f"{factor}e{exponent + power}")
        if gap > 0 and span / gap <= wanted:
            # Multiples are counted from the first, because k · gap for a huge k is not exact.
            first = math.ceil(low / gap)
            values = [(first + k) * gap for k in range(math.floor(span / gap) + 1)]
            values = [float(f"{value:.12g}") for value in values]
            values = [value for value in values if low <= value <= high]
            return values or [low, high]
    return [low, high]
