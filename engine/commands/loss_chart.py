"""Text charts of loss curves: one with the range of its losses, or several, each marked with its own letter.

Owns the positions of the dots, the axes, the ticks and the two character sets. Must not know: files, terminals, jax.
Letters: R rows and C columns of *dots*; a braille character is 4 dots high and 2 wide, an ASCII character is 1 by 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loopfeed.preprocess.quantities import round_numbers

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""The marks of several curves, in order."""
AXIS, RAW, SMOOTHED, BROKEN = "default", "dim", "bold cyan", "bold red"
"""The styles of a chart, as rich names them."""
_RUNS = tuple(f"bold {colour}" for colour in ("cyan", "magenta", "yellow", "green", "blue", "red"))
_LETTER_EVERY = 12  # columns between two letters of a curve, more if many curves are drawn
# Unicode 15, chapter "Braille Patterns": U+2800 plus one bit per dot, the fourth row added after the first three.
_BRAILLE_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_BRAILLE_BLANK = 0x2800
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
    num_broken: Integers  # [n], number of NaN or infinite losses of the point


class Span(NamedTuple):
    """Adjacent characters of the same style."""

    text: str
    style: str


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


def style_of(number: int) -> str:
    """Return the style of curve `number`, from 0; there are fewer styles than letters."""
    return _RUNS[number % len(_RUNS)]


def draw_chart(
    curves: Sequence[LossCurve], width: int, height: int, *, log_scale: bool = False, glyphs: Glyphs = UNICODE_GLYPHS
) -> list[list[Span]]:
    """Draw loss curves over the same axes.

    Of one curve, the range from `low` to `high` of each point is drawn, overlaid with the smoothed curve; of several,
    the smoothed curves, each with its letter along its way. Where curves share a character, they take turns.
    Step s of a range s0 … s1 falls on dot column `floor((s - s0 + ½) · C / (s1 - s0 + 1))`; the highest loss falls on
    the top row of dots, the lowest on the bottom one. Columns with a NaN or infinite loss (or, with `log_scale`,
    one that is not positive) have a mark on the step axis.

    Args:
        curves: at most 26, any of them empty.
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
    together = curves[0] if len(curves) == 1 else _join(curves)
    scale = _scale_of(together, log_scale)
    if scale is None:
        message = "no finite loss yet" if len(together.step) else "no loss yet"
        middle = message[:width].center(width)
        return [[Span(middle if row == height // 2 else "", AXIS)] for row in range(height)]
    plot_height = height - 2 if height >= _MIN_AXIS_HEIGHT else height
    ticks = _loss_ticks(scale, plot_height)
    gutter = max(map(len, ticks.values()), default=0) + 1
    if width - gutter < _MIN_PLOT_WIDTH:
        ticks, gutter = {}, 0
    lines = _plot(curves, together, scale, width - gutter, plot_height, glyphs)
    for row, line in enumerate(lines if gutter else []):
        label = ticks.get(row, "")
        line.insert(0, Span(label.rjust(gutter - 1) + (glyphs.tick if label else glyphs.vertical), AXIS))
    return [*lines, *(_step_axis(together, scale, width - gutter, gutter, glyphs) if plot_height < height else [])]


def _plot(
    curves: Sequence[LossCurve], together: LossCurve, scale: Scale, width: int, height: int, glyphs: Glyphs
) -> list[list[Span]]:
    """Return the lines of the area between the axes; `together` has the steps of all curves."""
    R, C = (height * 4, width * 2) if glyphs.braille else (height, width)
    cells = [_cells(_smoothed_dots(curve, together, scale, R, C), glyphs) for curve in curves]
    if len(curves) > 1:
        return _draw(cells, LETTERS, [style_of(number) for number in range(len(curves))], glyphs, lettered=True)
    # A character with a part of the smoothed curve omits the range.
    reach = np.where(cells[0] > 0, 0, _cells(_range_dots(together, scale, R, C), glyphs))
    return _draw([reach, *cells], ".*", (RAW, SMOOTHED), glyphs, lettered=False)


def _join(curves: Sequence[LossCurve]) -> LossCurve:
    """Return one curve with the points of all, in order of step, whose range is that of the smoothed losses."""
    step = np.concatenate([curve.step for curve in curves])
    order = np.argsort(step, kind="stable")
    smoothed = np.concatenate([curve.smoothed for curve in curves])[order]
    num_broken = np.concatenate([curve.num_broken for curve in curves])[order]
    return LossCurve(step[order], smoothed, smoothed, smoothed, num_broken)


def _scale_of(curve: LossCurve, log_scale: bool) -> Scale | None:
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


def _columns_of(steps: Floats, curve: LossCurve, num_columns: int) -> Integers:
    """Return the column of each step [n], of columns that cover the steps of `curve`."""
    first, last = curve.step[0], curve.step[-1]
    columns = np.floor((steps - first + 0.5) * (num_columns / (last - first + 1)))
    return np.clip(columns, 0, num_columns - 1).astype(np.int64)


def _rows_of(unit: Floats, num_rows: int) -> Integers:
    """Return the row of each position, from 0 at the top to num_rows - 1 at the bottom; positions must be finite."""
    return np.rint((1.0 - unit) * (num_rows - 1)).astype(np.int64)


def _range_dots(curve: LossCurve, scale: Scale, R: int, C: int) -> Bools:
    """Return the dots [R, C] of the range of each point."""
    columns = _columns_of(curve.step, curve, C)
    low = scale.unit(np.where(curve.low > 0, curve.low, scale.low) if scale.log else curve.low)
    high = scale.unit(curve.high)
    drawn = np.isfinite(low) & np.isfinite(high)
    tops, bottoms = np.full(C, R), np.full(C, -1)
    np.minimum.at(tops, columns[drawn], _rows_of(high[drawn], R))
    np.maximum.at(bottoms, columns[drawn], _rows_of(low[drawn], R))
    rows = np.arange(R)[:, None]
    return (rows >= tops) & (rows <= bottoms)


def _smoothed_dots(curve: LossCurve, together: LossCurve, scale: Scale, R: int, C: int) -> Bools:
    """Return the dots [R, C] of an unbroken line through the mean position in each column."""
    dots = np.zeros((R, C), np.bool_)
    unit = scale.unit(curve.smoothed)
    known = np.isfinite(unit)
    if not known.any():
        return dots
    columns = _columns_of(curve.step[known], together, C)
    num = np.bincount(columns, minlength=C)
    filled = np.flatnonzero(num)
    means = np.bincount(columns, unit[known], minlength=C)[filled] / num[filled]
    reach = np.arange(filled[0], filled[-1] + 1)
    line = _rows_of(np.interp(reach, filled, np.clip(means, 0.0, 1.0)), R)
    before = np.append(line[:1], line[:-1])
    # Each column starts after the previous column's row, so that steep parts have neither gaps nor doubled dots.
    start = np.where(line > before, before + 1, line)
    stop = np.where(line < before, before - 1, line)
    rows = np.arange(R)[:, None]
    dots[:, reach] = (rows >= start) & (rows <= stop)
    return dots


def _cells(dots: Bools, glyphs: Glyphs) -> Integers:
    """Return a number for each character of the dots [R, C], 0 without one: of braille, that of its pattern."""
    if not glyphs.braille:
        return dots.astype(np.int64)
    R, C = dots.shape
    return np.einsum("rich,ih->rc", dots.reshape(R // 4, 4, C // 2, 2).astype(np.int64), _BRAILLE_BITS)


def _draw(
    cells: Sequence[Integers], letters: str, styles: Sequence[str], glyphs: Glyphs, *, lettered: bool
) -> list[list[Span]]:
    """Return the lines of the area between the axes; `lettered` writes letters along braille curves too."""
    filled = np.stack(cells) > 0
    turn = np.arange(filled.shape[2]) % np.maximum(filled.sum(axis=0), 1)
    owners = np.argmax(filled & (np.cumsum(filled, axis=0) - 1 == turn), axis=0)
    codes = np.bitwise_or.reduce(np.stack(cells), axis=0)
    if glyphs.braille:
        texts = [[chr(_BRAILLE_BLANK + code) if code else " " for code in line] for line in codes.tolist()]
    else:
        pairs = zip(codes.tolist(), owners.tolist(), strict=True)
        texts = [[letters[owner] if code else " " for code, owner in zip(*pair, strict=True)] for pair in pairs]
    if glyphs.braille and lettered:
        every = max(_LETTER_EVERY, 3 * len(cells))
        taken: set[tuple[int, int]] = set()
        for number, each in enumerate(filled):
            for row, column in _places(each, every, number * every // len(cells), taken):
                texts[row][column], owners[row, column] = letters[number], number
                taken.add((row, column))
    return [
        _spans_of(text, [styles[owner] if letter != " " else RAW for letter, owner in zip(text, line, strict=True)])
        for text, line in zip(texts, owners.tolist(), strict=True)
    ]


def _places(filled: Bools, every: int, first: int, taken: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return where to write a curve's letter: near its end, and in every `every`th column from column `first` on."""
    columns = np.flatnonzero(filled.any(axis=0)).tolist()
    if not columns:
        return []
    near_end = columns[-1 : -1 - min(len(columns), math.ceil(every / 2)) : -1]
    places = []
    for candidates in (near_end, *([column] for column in range(first, near_end[-1], every) if column >= columns[0])):
        free = [(row, column) for column in candidates for row in np.flatnonzero(filled[:, column]).tolist()]
        free = [place for place in free if place not in taken]
        in_column = [place for place in free if place[1] == free[0][1]]
        places += in_column[len(in_column) // 2 :][:1]
    return places


def _spans_of(characters: Sequence[str], styles: Sequence[str]) -> list[Span]:
    """Join adjacent characters of the same style, so that the colour changes once per span, not per character."""
    pairs = groupby(zip(characters, styles, strict=True), key=lambda pair: pair[1])
    return [Span("".join(character for character, _ in pair), style) for style, pair in pairs]


def _step_axis(curve: LossCurve, scale: Scale, plot_width: int, gutter: int, glyphs: Glyphs) -> list[list[Span]]:
    """Return two lines: the step axis, with ticks and with marks for losses that cannot be drawn, and its labels."""
    axis, labels = [glyphs.horizontal] * plot_width, [" "] * plot_width
    first, last = float(curve.step[0]), float(curve.step[-1])
    free = 0  # the first free column for a label, one blank after the previous label
    for step in round_numbers(first, last, max(2, plot_width // 16)):
        if step != int(step):
            continue
        label = f"{int(step)}"
        column = int(_columns_of(np.array([step]), curve, plot_width)[0])
        start = min(max(0, column - len(label) // 2), plot_width - len(label))
        if start >= free:
            axis[column] = glyphs.step_tick
            labels[start : start + len(label)] = label
            free = start + len(label) + 1
    broken = curve.num_broken > 0
    if scale.log:
        broken |= curve.low <= 0
    styles = [AXIS] * plot_width
    for column in _columns_of(curve.step[broken], curve, plot_width).tolist():
        axis[column], styles[column] = glyphs.broken, BROKEN
    corner = glyphs.corner.rjust(gutter) if gutter else ""
    return [[Span(corner, AXIS), *_spans_of(axis, styles)], [Span(" " * gutter + "".join(labels).rstrip(), AXIS)]]


def _loss_ticks(scale: Scale, plot_height: int) -> dict[int, str]:
    """Return the tick labels of the loss axis, keyed by text row; row 0 is at the top."""
    wanted = max(2, plot_height // _ROWS_PER_TICK)
    values = _log_values(scale, wanted) if scale.log else []
    if len(values) < 2:
        values = round_numbers(scale.low, scale.high, wanted)
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
