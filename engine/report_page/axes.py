"""The range of an axis, and its round numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loopfeed.engine.records.loss_log import Floats
from loopfeed.engine.settings import LARGEST_FLOAT32

_LEAST_PART = 1e-9
_CUT_FACTOR, _CUT_PERCENTILE = 3.0, 98.0


@dataclass(frozen=True)
class Axis:
    """A linear axis.

    Attributes:
        low, high: its ends.
        ticks: round numbers between them.
        num_cut: how many values lie above `high` and are drawn there.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    num_cut: int = 0

    def place(self, values: Floats) -> Floats:
        """Return values as fractions of the axis, 0 … 1; values outside are moved to its ends."""
        with np.errstate(over="ignore"):  # a value that no float32 has, on a narrow axis
            return np.clip((values - self.low) / (self.high - self.low), 0, 1)


def steps_axis(last: float) -> Axis:
    """Return the axis of the steps, from 0."""
    return Axis(0.0, max(last, 1.0), tuple(each for each in round_numbers(0.0, max(last, 1.0), 4) if each == int(each)))


def value_axis(values: Sequence[Floats], *, from_zero: bool, most: float | None = None) -> Axis:
    """Return an axis for values of which some can be NaN; a few very high ones do not flatten the others.

    Args:
        values: the values of all lines.
        from_zero: whether the axis begins at 0 if no value is negative.
        most: the largest value that is possible.
    """
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
    if _are_same(low, high):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if high else (0.0, 1.0)
    ticks = round_numbers(low, high, 5)
    if len(ticks) > 1:
        between = ticks[1] - ticks[0]
        low = min(low, math.floor(low / between + 1e-9) * between) if not from_zero or low < 0 else low
        high = max(high, math.ceil(high / between - 1e-9) * between)
    if most is not None:
        high = min(high, most)
    return Axis(low, high, round_numbers(low, high, 5), int((found > high).sum()))


def round_numbers(low: float, high: float, most: int) -> tuple[float, ...]:
    """Return at most about `most` + 1 multiples of 1, 2 or 5 times a power of ten, between `low` and `high`."""
    if _are_same(low, high):
        return (low,)
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    between = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / between - 1e-9), math.floor(high / between + 1e-9)
    return tuple(float(f"{index * between:.12g}") for index in range(first, last + 1))


def _are_same(low: float, high: float) -> bool:
    """Return whether two numbers are too close for round numbers between them, or in the wrong order."""
    return not high - low > _LEAST_PART * max(abs(low), abs(high))
