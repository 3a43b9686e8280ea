"""Random rectangles in an image, drawn by area and aspect ratio, and their masks.

Shared by resized crops, cutmix and erasing. Does not depend on pixels.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from loopfeed.engine.images.positions import to_index, to_unit

NUM_ATTEMPTS = 10
"""Sizes tried before the draw of a box fails, as in torchvision."""
BLOCKS_OF_BOX = NUM_ATTEMPTS + 1
"""Blocks of random words that `draw_boxes` needs: one per attempt and one for the place."""


class Boxes(NamedTuple):
    """One rectangle in each of b images, in pixels: rows top … top + height - 1, columns left … left + width - 1."""

    top: Int32[Array, "b"]
    left: Int32[Array, "b"]
    height: Int32[Array, "b"]
    width: Int32[Array, "b"]


type Length = int | Int32[Array, "b"]
"""A side in pixels: of all images, or of each."""


class BoxRule(NamedTuple):
    """Limits on the boxes that may be drawn in an image.

    Attributes:
        area_range: least and largest fraction of the image's area; drawn uniformly.
        ratio_range: least and largest width / height; drawn log-uniformly.
        longest: largest height and width in pixels, inclusive.
    """

    area_range: tuple[float, float]
    ratio_range: tuple[float, float]
    longest: tuple[Length, Length]


def draw_boxes(
    words: UInt32[Array, "b BLOCKS_OF_BOX 2"], rule: BoxRule, height: Length, width: Length
) -> tuple[Boxes, Bool[Array, "b"]]:
    """Draw a box in each image: the first of ten random sizes that fits, at a uniformly random place.

    Args:
        words: uniform.
        rule: limits on the boxes.
        height, width: size of the images in pixels.

    Returns:
        The boxes, and False where none of the ten sizes fitted and the box is meaningless.
    """
    shares, stretches = to_unit(words[:, :NUM_ATTEMPTS, 0]), to_unit(words[:, :NUM_ATTEMPTS, 1])
    least, largest = rule.area_range
    areas = _column(height * width) * (least + shares * (largest - least))
    least, largest = (math.log(ratio) for ratio in rule.ratio_range)
    ratios = jnp.exp(least + stretches * (largest - least))
    heights = jnp.round(jnp.sqrt(areas / ratios)).astype(jnp.int32)
    widths = jnp.round(jnp.sqrt(areas * ratios)).astype(jnp.int32)
    most_rows, most_columns = map(_column, rule.longest)
    fits = (heights > 0) & (widths > 0) & (heights <= most_rows) & (widths <= most_columns)
    box_height, box_width = heights[:, -1], widths[:, -1]
    for attempt in reversed(range(NUM_ATTEMPTS - 1)):
        box_height = jnp.where(fits[:, attempt], heights[:, attempt], box_height)
        box_width = jnp.where(fits[:, attempt], widths[:, attempt], box_width)
    place = words[:, NUM_ATTEMPTS]
    top = to_index(place[:, 0], height - box_height + 1)
    left = to_index(place[:, 1], width - box_width + 1)
    return Boxes(top, left, box_height, box_width), fits.any(axis=1)


def _column(length: Length) -> Length | Int32[Array, "b 1"]:
    """Return a length that is broadcast along the attempts."""
    return length if isinstance(length, int) else length[:, None]


def mask_boxes(boxes: Boxes, height: int, width: int) -> Bool[Array, "b {height} {width}"]:
    """Return a mask that is True inside the boxes."""
    rows = jnp.arange(height) - boxes.top[:, None]
    columns = jnp.arange(width) - boxes.left[:, None]
    in_rows = (rows >= 0) & (rows < boxes.height[:, None])
    in_columns = (columns >= 0) & (columns < boxes.width[:, None])
    return in_rows[:, :, None] & in_columns[:, None, :]
