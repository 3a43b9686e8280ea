"""The operations of RandAugment and TrivialAugment as a table of integers: one row per operation, magnitude and sign.

The ranges are those of torchvision's RandAugment (Cubuk et al., 2020, arXiv:1909.13719) and TrivialAugmentWide (Müller
and Hutter, 2021, arXiv:2103.10158). Computed on the host while tracing; does not depend on jax.
"""

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from loopfeed.engine.images.settings import NUM_MAGNITUDES

ONE = 2**12
"""A factor of 1."""
UNIT = 2**16
"""One pixel in an affine map; Pillow's unit, too."""
NO_THRESHOLD = 256


class Operation(enum.IntEnum):
    """The operations. Runs depend on these numbers."""

    IDENTITY = 0
    SHEAR_X = 1
    SHEAR_Y = 2
    TRANSLATE_X = 3
    TRANSLATE_Y = 4
    ROTATE = 5
    BRIGHTNESS = 6
    COLOUR = 7
    CONTRAST = 8
    SHARPNESS = 9
    POSTERIZE = 10
    SOLARIZE = 11
    AUTOCONTRAST = 12
    EQUALIZE = 13


class Row(NamedTuple):
    """The parameters of one row; those of other operations have the values that change nothing.

    Attributes:
        operation: number of the operation.
        affine: the map from a pixel (x, y) of the result to its source: x' = (a0 · x + a1 · y + a2) / UNIT, rounded
            down, and y' = (a3 · x + a4 · y + a5) / UNIT.
        factor: weight of the image against its blurred, grey or black version, in units of 1 / ONE.
        mask: bits of a level that are kept.
        threshold: least level that is inverted.
    """

    operation: int
    affine: tuple[int, int, int, int, int, int] = (UNIT, 0, UNIT // 2, 0, UNIT, UNIT // 2)
    factor: int = ONE
    mask: int = 255
    threshold: int = NO_THRESHOLD


@dataclass(frozen=True)
class Ranges:
    """The largest strength of each operation, reached at the last magnitude; all grow linearly from 0.

    Attributes:
        shear: tangent of the angle.
        translate_x, translate_y: pixels.
        rotate: degrees.
        blend: distance of a factor from 1.
        posterize: bits dropped, of 8.
    """

    shear: float
    translate_x: float
    translate_y: float
    rotate: float
    blend: float
    posterize: int


def ranges_of(policy: str, height: int, width: int) -> Ranges:
    """Return the ranges of "randaugment" or "trivialaugment" for images of `height` × `width` pixels."""
    if policy == "randaugment":
        return Ranges(0.3, 150 / 331 * width, 150 / 331 * height, 30, 0.9, 4)
    return Ranges(0.99, 32, 32, 135, 0.99, 6)


def table_rows(policy: str, height: int, width: int) -> Int32[np.ndarray, "14*31*2 10"]:
    """Return the table: rows by operation, magnitude, sign (+ then -); columns as in `Row`."""
    ranges = ranges_of(policy, height, width)
    rows = [
        make_row(operation, magnitude, sign, ranges, height, width)
        for operation in Operation
        for magnitude in range(NUM_MAGNITUDES)
        for sign in (1, -1)
    ]
    flat = [(row.operation, *row.affine, row.factor, row.mask, row.threshold) for row in rows]
    return np.array(flat, np.int32)


def make_row(operation: Operation, magnitude: int, sign: int, ranges: Ranges, height: int, width: int) -> Row:
    """Return the parameters of an operation at a magnitude of 0 … 30 with a sign, for images of a size."""
    share = magnitude / (NUM_MAGNITUDES - 1)
    shear, neutral = sign * share * ranges.shear, Row(operation)
    match operation:
        case Operation.SHEAR_X:
            return neutral._replace(affine=_fixed(1, shear, 0, 0, 1, 0))
        case Operation.SHEAR_Y:
            return neutral._replace(affine=_fixed(1, 0, 0, shear, 1, 0))
        case Operation.TRANSLATE_X:
            return neutral._replace(affine=_fixed(1, 0, -sign * _pixels(magnitude, ranges.translate_x), 0, 1, 0))
        case Operation.TRANSLATE_Y:
            return neutral._replace(affine=_fixed(1, 0, 0, 0, 1, -sign * _pixels(magnitude, ranges.translate_y)))
        case Operation.ROTATE:
            return neutral._replace(affine=_rotation(sign * share * ranges.rotate, height, width))
        case Operation.BRIGHTNESS | Operation.COLOUR | Operation.CONTRAST | Operation.SHARPNESS:
            return neutral._replace(factor=ONE + round(sign * share * ranges.blend * ONE))
        case Operation.POSTERIZE:
            return neutral._replace(mask=256 - (1 << round(share * ranges.posterize)))
        case Operation.SOLARIZE:
            return neutral._replace(threshold=math.ceil(255 * (NUM_MAGNITUDES - 1 - magnitude) / (NUM_MAGNITUDES - 1)))
        case _:
            return neutral


def _pixels(magnitude: int, most: float) -> int:
    """Return the whole pixels of a translation, cut off as torchvision cuts off an element of its float32 `linspace`.

    In its second half, that counts back from the end in steps that are rounded to float32: TrivialAugment's strength 15
    of 30 is a little less than 16 pixels, so 15.
    """
    most, step = float(np.float32(most)), float(np.float32(most) / np.float32(NUM_MAGNITUDES - 1))
    back = NUM_MAGNITUDES - 1 - magnitude
    return int(step * magnitude if magnitude < NUM_MAGNITUDES // 2 else most - step * back)


def _rotation(degrees: float, height: int, width: int) -> tuple[int, int, int, int, int, int]:
    """Return the map that rotates an image counter-clockwise about its centre."""
    cosine, sine = (round(part(math.radians(-degrees)), 15) for part in (math.cos, math.sin))
    x, y = width / 2, height / 2
    return _fixed(cosine, sine, x - cosine * x - sine * y, -sine, cosine, y + sine * x - cosine * y)


def _fixed(*affine: float) -> tuple[int, int, int, int, int, int]:
    """Convert a map between the pixels' corners to one between their centres, in units of 1 / UNIT, as Pillow does."""
    a, b, c, d, e, f = affine
    shifted = (a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5)
    x_x, x_y, x_1, y_x, y_y, y_1 = (math.floor(value * UNIT + 0.5) for value in shifted)
    return x_x, x_y, x_1, y_x, y_y, y_1
