"""RandAugment and TrivialAugment of packed pixels, in integer arithmetic throughout.

Every operation is defined on the 8-bit levels and equals Pillow's, which torchvision's PIL backend uses: exactly for
the geometric ones (nearest pixel, black outside), posterize, solarize and equalize; up to one level for brightness,
colour, contrast, sharpness and autocontrast, where Pillow computes in floats and cuts off the fraction. Each operation
runs on the whole batch with parameters that change nothing in the other images, so that a GPU has no divergent work;
only the two that need a histogram run image by image, where they were drawn. Nothing is scattered: a histogram is a
product of two one-hot matrices, exact in float32.
"""

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Key, UInt32

from loopfeed.engine.images.jitter import Planes, join_planes, luma_of, mean_luma, split_planes
from loopfeed.engine.images.positions import Purpose, draw_words, to_index
from loopfeed.engine.images.settings import NUM_MAGNITUDES, Augmentation

ONE = 2**12
"""A factor of 1."""
UNIT = 2**16
"""One pixel in an affine map; Pillow's unit, too."""
NO_THRESHOLD = 256

_LEVELS = 256
# Pixels that are counted at once: with all of a 224 px image, a CPU took six times as long.
_PIECE = 2048


def auto_augment(
    augmentation: Augmentation, pixels: UInt32[Array, "b H W"], keys: Key[Array, "b"]
) -> UInt32[Array, "b H W"]:
    """Apply random operations to each image, chosen as `augmentation.auto_augment` says.

    RandAugment applies `auto_augment_ops` operations at magnitude `auto_augment_magnitude`; TrivialAugment applies one
    at a uniformly random magnitude. The operations and their signs are uniformly random.

    Args:
        augmentation: the settings, static.
        pixels: packed, as are the results, whose low byte is 0.
        keys: keys of the images, from `loopfeed.engine.images.positions.image_keys`.
    """
    table = jnp.asarray(table_rows(augmentation.auto_augment, *pixels.shape[1:]))
    is_random = augmentation.auto_augment == "randaugment"
    num_ops = augmentation.auto_augment_ops if is_random else 1
    words = draw_words(keys, Purpose.AUTO_AUGMENT, num_ops)
    magnitude = augmentation.auto_augment_magnitude if is_random else None
    rows = jnp.take(table, draw_rows(words, magnitude), axis=0, mode="clip")
    if num_ops == 1:
        return apply_rows(pixels, rows[:, 0])
    return lax.scan(lambda images, row: (apply_rows(images, row), None), pixels, jnp.swapaxes(rows, 0, 1))[0]


def draw_rows(words: UInt32[Array, "b n 2"], magnitude: int | None) -> Int32[Array, "b n"]:
    """Draw rows of the table from uniform words; a magnitude of None is drawn too."""
    operations = to_index(words[..., 0], len(Operation))
    if magnitude is None:
        return operations * (2 * NUM_MAGNITUDES) + to_index(words[..., 1], 2 * NUM_MAGNITUDES)
    return (operations * NUM_MAGNITUDES + magnitude) * 2 + to_index(words[..., 1], 2)


def apply_rows(pixels: UInt32[Array, "b H W"], rows: Int32[Array, "b 10"]) -> UInt32[Array, "b H W"]:
    """Apply to each packed image the operation of its row of the table."""
    operations, factors, masks, thresholds = (rows[:, column, None, None] for column in (0, 7, 8, 9))
    # Because of the barriers, no pixel is moved or blended again for each of its uses.
    planes = split_planes(lax.optimization_barrier(_move_pixels(pixels, rows[:, 1:7])))
    planes = lax.optimization_barrier(_blend_planes(planes, operations, factors))
    red, green, blue = (_invert(plane & masks, thresholds) for plane in planes)
    return join_planes(_remap(jnp.stack([red, green, blue], axis=1), rows[:, 0]))


def _move_pixels(pixels: UInt32[Array, "b H W"], affine: Int32[Array, "b 6"]) -> UInt32[Array, "b H W"]:
    """Take each pixel from where an affine map leads to, or black (0) from outside the image."""
    height, width = pixels.shape[1:]
    x, y = jnp.arange(width, dtype=jnp.int32), jnp.arange(height, dtype=jnp.int32)[:, None]
    a0, a1, a2, a3, a4, a5 = (affine[:, number, None, None] for number in range(6))
    # A sum may exceed 32 bits on the way; it wraps around, and the result is right again.
    columns, lines = (a0 * x + a1 * y + a2) >> 16, (a3 * x + a4 * y + a5) >> 16
    is_inside = (columns >= 0) & (columns < width) & (lines >= 0) & (lines < height)
    places = jnp.where(is_inside, lines * width + columns, 0).reshape(len(pixels), -1)
    moved = jnp.take_along_axis(pixels.reshape(len(pixels), -1), places, axis=1, mode="clip")
    return jnp.where(is_inside, moved.reshape(pixels.shape), 0)


def _blend_planes(planes: Planes, operations: Int32[Array, "b 1 1"], factors: Int32[Array, "b 1 1"]) -> Planes:
    """Blend each image with black, its grey, its mean luma or its blurred version, as its operation says."""
    luma, mean = luma_of(planes), mean_luma(planes)

    def blend(plane: jax.Array) -> jax.Array:
        other = jnp.where(operations == Operation.COLOUR, luma, 0)
        other = jnp.where(operations == Operation.CONTRAST, mean, other)
        other = jnp.where(operations == Operation.SHARPNESS, _blur(plane), other)
        return jnp.clip((factors * plane + (ONE - factors) * other + ONE // 2) >> 12, 0, 255)

    red, green, blue = (blend(plane) for plane in planes)
    return red, green, blue


def _blur(plane: Int32[Array, "b H W"]) -> Int32[Array, "b H W"]:
    """Smooth levels with Pillow's kernel (1 around, 5 in the middle, over 13); the border stays."""
    height, width = plane.shape[1:]
    if height < 3 or width < 3:
        return plane
    rows = plane[:, :-2] + plane[:, 1:-1] + plane[:, 2:]
    sums = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * plane[:, 1:-1, 1:-1]
    return jnp.pad(lax.div(2 * sums + 13, jnp.int32(26)), ((0, 0), (1, 1), (1, 1))) + jnp.where(
        _is_border(height, width), plane, 0
    )


def _is_border(height: int, width: int) -> jax.Array:
    y, x = jnp.arange(height)[:, None], jnp.arange(width)
    return (y == 0) | (y == height - 1) | (x == 0) | (x == width - 1)


def _invert(plane: jax.Array, thresholds: jax.Array) -> jax.Array:
    return jnp.where(plane >= thresholds, 255 - plane, plane)


def _remap(levels: Int32[Array, "b 3 H W"], operations: Int32[Array, "b"]) -> Planes:
    """Apply autocontrast or equalize to the images whose operation is one of them."""

    def remap_one(image_and_operation: tuple[jax.Array, jax.Array]) -> jax.Array:
        image, operation = image_and_operation
        is_remapped = operation >= Operation.AUTOCONTRAST
        return lax.cond(is_remapped, lambda: _remap_image(image, operation), lambda: image)

    remapped = lax.map(remap_one, (levels, operations))
    return remapped[:, 0], remapped[:, 1], remapped[:, 2]


def _remap_image(image: Int32[Array, "3 H W"], operation: Int32[Array, ""]) -> Int32[Array, "3 H W"]:
    """Apply autocontrast or equalize to the levels of an image, channel by channel."""
    flat = image.reshape(3, -1)
    counts = count_levels(flat)
    stretched, equalized = _autocontrast_table(counts), _equalize_table(counts)
    table = jnp.where(operation == Operation.EQUALIZE, equalized, stretched)
    return jnp.take_along_axis(table, flat, axis=1, mode="clip").reshape(image.shape)


def count_levels(flat: Int32[Array, "3 P"]) -> Int32[Array, "3 256"]:
    """Return how often each level occurs in each channel, for P ≤ 2**24 pixels."""
    sixteen = jnp.arange(16)[:, None]
    length = min(_PIECE, flat.shape[1])
    # -1 is counted nowhere.
    padded = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % length)), constant_values=-1)

    def add(counts: jax.Array, piece: jax.Array) -> tuple[jax.Array, None]:
        high, low = ((part[:, None] == sixteen).astype(jnp.float32) for part in (piece >> 4, piece & 15))
        return counts + jnp.einsum("chp,clp->chl", high, low, precision=lax.Precision.HIGHEST), None

    pieces = jnp.moveaxis(padded.reshape(3, -1, length), 1, 0)
    counts, _ = lax.scan(add, jnp.zeros((3, 16, 16), jnp.float32), pieces)
    return counts.reshape(3, _LEVELS).astype(jnp.int32)


def _autocontrast_table(counts: Int32[Array, "3 256"]) -> Int32[Array, "3 256"]:
    """Return the table that stretches the levels of each channel to 0 … 255, rounding down."""
    level = jnp.arange(_LEVELS, dtype=jnp.int32)
    low = jnp.where(counts > 0, level, _LEVELS).min(axis=1, keepdims=True)
    spread = jnp.where(counts > 0, level, -1).max(axis=1, keepdims=True) - low
    stretched = jnp.clip((level - low) * 255 // jnp.maximum(spread, 1), 0, 255)
    return jnp.where(spread > 0, stretched, level)


def _equalize_table(counts: Int32[Array, "3 256"]) -> Int32[Array, "3 256"]:
    """Return the table that spreads the levels of each channel evenly, as Pillow's equalize does."""
    level = jnp.arange(_LEVELS, dtype=jnp.int32)
    last = jnp.where(counts > 0, level, -1).max(axis=1, keepdims=True)
    in_last = jnp.where(level == last, counts, 0).sum(axis=1, keepdims=True)
    step = (counts.sum(axis=1, keepdims=True) - in_last) // 255
    below = jnp.cumsum(counts, axis=1) - counts
    spread = jnp.clip((below + step // 2) // jnp.maximum(step, 1), 0, 255)
    return jnp.where(step > 0, spread, level)


# The ranges are those of torchvision's RandAugment (Cubuk et al., 2020, arXiv:1909.13719) and TrivialAugmentWide
# (Müller and Hutter, 2021, arXiv:2103.10158).
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
