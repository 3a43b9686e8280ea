"""Exact sums of the colour channels, from which the manifest's mean and standard deviation are computed.

All sums are integers, so the results do not depend on the order, the number of workers or interruptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.pixels import Layout

Triple = tuple[int, int, int]

_PIXEL_BYTES: dict[Layout, int] = {"packed": 4, "dense": 3}
_MOST_ROWS_OF_16_BITS = 257  # 257 · 255 = 65535


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


def channel_sums(words: NDArray[np.uint32], layout: Layout) -> NDArray[np.int64]:
    """Return the int64 ``[n, 2, 3]`` channel sums of the values and of their squares for ``n`` images.

    Rows of the result can be added for up to 10^14 pixels, well below overflow at 2^63.

    Args:
        words: uint32 ``[n, H, row_words]``, in any byte order. H must be at most 66,051, so that the squares of a
            column add up to at most 32 bits.
        layout: how they contain the pixels.
    """
    n, H, _ = words.shape
    bytes_of_rows = np.ascontiguousarray(words, "<u4").view(np.uint8)
    values = bytes_of_rows.astype(np.uint16)
    # Summing columns first lets NumPy add whole rows, and sums of at most 257 values stay in the same 16 bits: 44 µs
    # per packed image at 224 px, against 62 with sums of 32 bits and 1.4 ms pixel by pixel.
    columns = np.empty((n, 2, values.shape[2]), np.uint32)
    columns[:, 0] = values.sum(axis=1, dtype=np.uint16 if H <= _MOST_ROWS_OF_16_BITS else np.uint32)
    np.multiply(values, values, out=values)  # 255² fits in 16 bits
    values.sum(axis=1, dtype=np.uint32, out=columns[:, 1])
    # With a channel's columns side by side, the last sum takes less than half the time.
    by_channel = columns.reshape(n, 2, -1, _PIXEL_BYTES[layout]).swapaxes(2, 3).astype(np.int64, order="C")
    sums = by_channel.sum(axis=3)
    return sums if layout == "dense" else sums[..., :0:-1]  # a packed pixel is 0, B, G, R


def _add(left: Triple, right: Triple) -> Triple:
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]
