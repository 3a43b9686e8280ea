"""Text charts of several loss curves, which can be told apart without colour: each is marked with its own letter.

Must not know: files, terminals, colours, jax.
"""

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from loopfeed.engine.commands.loss_chart import (
    BRAILLE_BLANK,
    Glyphs,
    Ink,
    LossCurve,
    Plot,
    Scale,
    Span,
    blank_chart,
    braille_cells,
    columns_of,
    lay_out,
    scale_of,
    smoothed_dots,
    spans_of,
    with_axes,
)

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""The marks of the curves, in order."""
_INKS: tuple[Ink, ...] = ("run 1", "run 2", "run 3", "run 4", "run 5", "run 6")
_LETTER_EVERY = 12  # columns between two letters of a curve, more if many curves are drawn

Bools = npt.NDArray[np.bool_]


def ink_of(number: int) -> Ink:
    """Return the ink of curve `number`, from 0; there are fewer inks than letters."""
    return _INKS[number % len(_INKS)]


def draw_overlay(
    curves: Sequence[LossCurve], width: int, height: int, *, log_scale: bool, glyphs: Glyphs
) -> list[list[Span]]:
    """Draw the smoothed loss of several runs over the same axes, each curve marked with its letter along its way.

    Where curves share a character of the ASCII set, their letters take turns from column to column.

    Args:
        curves: at most 26, any of them empty; each is marked with the letter of its place.
        width: columns of characters, at least 1.
        height: lines, at least 1.
        log_scale: whether the loss axis is logarithmic.
        glyphs: the character set.

    Returns:
        Exactly `height` lines of at most `width` characters.
    """
    together = _join(curves)
    scale = scale_of(together, log_scale)
    if scale is None:
        return blank_chart(width, height, "no finite loss yet" if len(together.step) else "no loss yet")
    plot = lay_out(scale, width, height)
    dots = [_dots_of(curve, together, scale, plot, glyphs) for curve in curves]
    lines = _mark_braille(dots, plot) if glyphs.braille else _mark_ascii(dots, plot)
    return with_axes(lines, together, scale, plot, height, glyphs)


def _join(curves: Sequence[LossCurve]) -> LossCurve:
    """Return one curve with the points of all, in order of step, whose range is that of the smoothed losses."""
    step = np.concatenate([curve.step for curve in curves])
    order = np.argsort(step, kind="stable")
    smoothed = np.concatenate([curve.smoothed for curve in curves])[order]
    num_broken = np.concatenate([curve.num_broken for curve in curves])[order]
    return LossCurve(step[order], smoothed, smoothed, smoothed, num_broken)


def _dots_of(curve: LossCurve, together: LossCurve, scale: Scale, plot: Plot, glyphs: Glyphs) -> Bools:
    R, C = (plot.height * 4, plot.width * 2) if glyphs.braille else (plot.height, plot.width)
    if not len(curve.step):
        return np.zeros((R, C), np.bool_)
    return smoothed_dots(columns_of(curve.step, together, C), scale.unit(curve.smoothed), R, C)


def _mark_ascii(dots: Sequence[Bools], plot: Plot) -> list[list[Span]]:
    lines = []
    for row in range(plot.height):
        texts, inks = [" "] * plot.width, [_INKS[0]] * plot.width
        for column in range(plot.width):
            here = [number for number, each in enumerate(dots) if each[row, column]]
            if here:
                number = here[column % len(here)]
                texts[column], inks[column] = LETTERS[number], ink_of(number)
        lines.append(spans_of(texts, inks))
    return lines


def _mark_braille(dots: Sequence[Bools], plot: Plot) -> list[list[Span]]:
    codes = np.zeros((plot.height, plot.width), np.int64)
    owners = np.zeros((plot.height, plot.width), np.int64)
    cells = [braille_cells(each) for each in dots]
    for number, each in enumerate(cells):
        codes |= each
        owners[each > 0] = number
    texts = [[chr(BRAILLE_BLANK + code) if code else " " for code in line] for line in codes.tolist()]
    taken: set[tuple[int, int]] = set()
    every = max(_LETTER_EVERY, 3 * len(dots))
    for number, each in enumerate(cells):
        for row, column in _places(each > 0, every, number * every // len(dots), taken):
            texts[row][column], owners[row, column] = LETTERS[number], number
            taken.add((row, column))
    return [
        spans_of(text, [ink_of(number) for number in line]) for text, line in zip(texts, owners.tolist(), strict=True)
    ]


def _places(filled: Bools, every: int, first: int, taken: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return where to write a curve's letter: near its end, and in every `every`th column from column `first` on."""
    columns = np.flatnonzero(filled.any(axis=0)).tolist()
    if not columns:
        return []
    near_end = columns[-1 : -1 - min(len(columns), math.ceil(every / 2)) : -1]
    wanted = chain([near_end], ([column] for column in range(first, near_end[-1], every) if column >= columns[0]))
    places = []
    for candidates in wanted:
        for column in candidates:
            rows = np.flatnonzero(filled[:, column]).tolist()
            free = [row for row in rows if (row, column) not in taken]
            if free:
                places.append((free[len(free) // 2], column))
                break
    return places
