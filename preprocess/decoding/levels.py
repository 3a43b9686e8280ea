"""The values of an image of more than 8 bits that become black and white."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.quantities import parse_float


@dataclass(frozen=True)
class Levels:
    """The values that become black (`low`) and white (`high`); values between are scaled, values beyond are clipped.

    Raises:
        ValueError: they are not finite, or `low` is not less than `high`.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(
                f"levels must be two finite numbers LOW:HIGH with LOW less than HIGH, got {self}; use 0:4095 for 12 "
                "bits"
            )

    def __str__(self) -> str:
        return f"{_shown(self.low)}:{_shown(self.high)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "0:4095"; raise ValueError for anything else."""
        low, separator, high = text.partition(":")
        try:
            numbers = parse_float(low), parse_float(high)
        except ValueError:
            separator = ""
        if not separator:
            raise ValueError(f"levels must be two numbers LOW:HIGH, got {text!r}; use 0:4095 for 12 bits")
        return cls(*numbers)

    def scale(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        """Return values of any shape and type as uint8: `low` becomes 0, `high` 255, rounded to the nearest level.

        No value may be NaN.
        """
        clipped = np.clip(values.astype(np.float64), self.low, self.high)
        return np.floor((clipped - self.low) * 255.0 / (self.high - self.low) + 0.5).astype(np.uint8)


def _shown(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 2**53 else repr(value)
