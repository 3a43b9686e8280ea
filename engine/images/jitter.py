"""Colour jitter of packed pixels, in integer arithmetic throughout.

The operations are those of torchvision's ColorJitter on 8-bit images: levels are rounded and clipped after each.
torchvision draws their order in each call. Here it is fixed, because with a random order per image all four operations
would be computed at each of four places: four times the work, with no known benefit. Integer arithmetic gives the same
result on every device and in every batch. The luma is Pillow's, 0.299 R + 0.587 G + 0.114 B in 16 bits.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

from loopfeed.engine.images.positions import to_index

type Planes = tuple[Int32[Array, "b H W"], Int32[Array, "b H W"], Int32[Array, "b H W"]]
"""R, G and B levels, 0 … 255."""

_ONE = 2**12
"""A factor of 1, or a sixth of a turn of the colour circle."""


def split_planes(pixels: UInt32[Array, "b H W"]) -> Planes:
    """Split packed words into R, G and B planes."""
    red, green, blue = (((pixels >> shift) & 0xFF).astype(jnp.int32) for shift in (24, 16, 8))
    return red, green, blue


def join_planes(planes: Planes) -> UInt32[Array, "b H W"]:
    """Pack R, G and B planes into words, whose low byte is 0."""
    red, green, blue = (plane.astype(jnp.uint32) for plane in planes)
    return red << 24 | green << 16 | blue << 8


def draw_factors(words: UInt32[Array, "b"], strength: float) -> Int32[Array, "b"]:
    """Draw factors in units of 1/4096, uniformly from max(0, 1 - strength) … 1 + strength, from uniform words."""
    least, largest = round(max(0.0, 1 - strength) * _ONE), round((1 + strength) * _ONE)
    return least + to_index(words, largest - least + 1)


def draw_turns(words: UInt32[Array, "b"], hue: float) -> Int32[Array, "b"]:
    """Draw rotations in units of 1/24576 of the colour circle, uniformly from -hue … hue turns, from uniform words."""
    most = round(hue * 6 * _ONE)
    return to_index(words, 2 * most + 1) - most


def change_brightness(planes: Planes, factors: Int32[Array, "b"]) -> Planes:
    """Multiply every level by its image's factor (in units of 1/4096)."""
    red, green, blue = (_blend(plane, jnp.int32(0), factors) for plane in planes)
    return red, green, blue


def change_contrast(planes: Planes, factors: Int32[Array, "b"]) -> Planes:
    """Scale each level's distance from its image's mean luma by a factor (in units of 1/4096).

    Factor 0 gives the mean.

    Raises:
        ValueError: if an image has more pixels than 32 bits can sum.
    """
    mean = mean_luma(planes)
    red, green, blue = (_blend(plane, mean, factors) for plane in planes)
    return red, green, blue


def change_saturation(planes: Planes, factors: Int32[Array, "b"]) -> Planes:
    """Scale each level's distance from its pixel's luma by a factor (in units of 1/4096); 0 gives grey."""
    luma = luma_of(planes)
    red, green, blue = (_blend(plane, luma, factors) for plane in planes)
    return red, green, blue


def turn_hue(planes: Planes, turns: Int32[Array, "b"]) -> Planes:
    """Rotate the hue of each image in the HSV hexagon (Smith, 1978); value and saturation stay the same.

    Hues are in units of 1/(4096 · chroma) of a sixth of the circle: integers, without a division. Turns are in 1/24576
    of the circle, -12288 … 12288.
    """
    red, green, blue = planes
    value = jnp.maximum(jnp.maximum(red, green), blue)
    chroma = value - jnp.minimum(jnp.minimum(red, green), blue)
    sixth = chroma * _ONE
    circle = 6 * sixth
    sector = jnp.where(value == red, green - blue, jnp.where(value == green, blue - red, red - green))
    offset = jnp.where(value == red, 0, jnp.where(value == green, 2 * chroma, 4 * chroma))
    hue = (sector + offset) * _ONE + turns[:, None, None] * chroma
    hue = jnp.where(hue < 0, hue + circle, hue)
    hue = jnp.where(hue >= circle, hue - circle, hue)

    def level(sixths: int) -> Int32[Array, "b H W"]:
        angle = hue + sixths * sixth
        angle = jnp.where(angle >= circle, angle - circle, angle)
        drop = jnp.clip(jnp.minimum(angle, 4 * sixth - angle), 0, sixth)
        return value - ((drop + _ONE // 2) >> 12)

    return level(5), level(3), level(1)


def mean_luma(planes: Planes) -> Int32[Array, "b 1 1"]:
    """Return the mean luma of each image, rounded.

    Raises:
        ValueError: if an image has more pixels than 32 bits can sum.
    """
    num_pixels = planes[0].shape[1] * planes[0].shape[2]
    if num_pixels * 256 > 2**32:
        raise ValueError(f"contrast requires images of at most 2**24 pixels, got {num_pixels}: store smaller images")
    # An integer sum does not depend on the order in which a device adds.
    total = luma_of(planes).astype(jnp.uint32).sum(axis=(1, 2), keepdims=True, dtype=jnp.uint32)
    return ((total + num_pixels // 2) // num_pixels).astype(jnp.int32)


def luma_of(planes: Planes) -> Int32[Array, "b H W"]:
    """Return the luma of each pixel, 0 … 255."""
    red, green, blue = planes
    return (19595 * red + 38470 * green + 7471 * blue + 2**15) >> 16


def _blend(
    plane: Int32[Array, "b H W"], other: Int32[Array, "..."], factors: Int32[Array, "b"]
) -> Int32[Array, "b H W"]:
    """Interpolate or extrapolate from `other` (factor 0) to `plane` (factor 1); round and clip to 0 … 255."""
    factor = factors[:, None, None]
    return jnp.clip((factor * plane + (_ONE - factor) * other + _ONE // 2) >> 12, 0, 255)
