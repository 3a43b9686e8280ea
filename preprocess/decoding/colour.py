"""Turns any of Pillow's colour modes into 8-bit grey or RGB.

Colour profiles are not applied: the numbers in the file are the numbers in the shard, as in every ImageNet pipeline.

Images are converted tile by tile, so that a conversion holds the image, its result and some MB, whatever their size.
"""

from collections.abc import Iterator

import numpy as np
from PIL import Image

_TILE_PIXELS = 2**20


def to_grey_or_rgb(image: Image.Image) -> Image.Image:
    """Returns the image in mode "L" or "RGB".

    - Transparent images are laid on white, which is what a viewer shows; Pillow's own `convert("RGB")` would uncover
      whatever colour the transparent pixels happen to hold.
    - CMYK becomes (255 − ink) · (255 − black) / 255. Pillow has already undone Adobe's inverted JPEG inks.
    - Grey of more than 8 bits is scaled, not clipped: 0 … 65535 to 0 … 255, rounded; a 32-bit integer must lie in that
      range. Of 16-bit colour and of 16-bit grey with alpha Pillow has kept the high byte, at most one level from it.
    - Floats in 0 … 1 are scaled to 0 … 255; in 0 … 255 they are taken as they are.

    Raises:
        ValueError: values outside these ranges, or a mode Pillow cannot turn into RGB.
    """
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_sixteen_bits(image)
    if image.mode == "F":
        return _from_floats(image)
    if image.has_transparency_data:
        return _on_white(image)
    if image.mode == "1":
        return image.convert("L")
    return image.convert("RGB")


def _tiles(image: Image.Image) -> Iterator[tuple[int, int, int, int]]:
    """Yields boxes (left, top, right, bottom) that cover the image, each of `_TILE_PIXELS` at most."""
    width = min(image.width, _TILE_PIXELS)
    height = max(1, _TILE_PIXELS // width)
    for top in range(0, image.height, height):
        for left in range(0, image.width, width):
            yield left, top, min(left + width, image.width), min(top + height, image.height)


def _on_white(image: Image.Image) -> Image.Image:
    laid = Image.new("RGB", image.size)
    for box in _tiles(image):
        rgba = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        laid.paste(Image.alpha_composite(white, rgba).convert("RGB"), box[:2])
    return laid


def _from_sixteen_bits(image: Image.Image) -> Image.Image:
    low, high = _extremes(image) if image.mode == "I" else (0, 65535)
    if low < 0 or high > 65535:
        raise ValueError(
            f"integer pixels run from {low:.0f} to {high:.0f}; 0 … 65535 is understood, save it with 8 or 16 bits"
        )
    levels = ((np.arange(65536) + 128) // 257).astype(np.uint8)  # 65535 = 255 · 257
    transparent = image.info.get("transparency")
    if transparent is not None and 0 <= transparent <= 65535:
        levels[transparent] = 255
    grey = Image.new("L", image.size)
    for box in _tiles(image):
        grey.paste(Image.fromarray(levels[np.asarray(image.crop(box))]), box[:2])
    return grey


def _from_floats(image: Image.Image) -> Image.Image:
    low, high = _extremes(image)
    if not (low >= 0.0 and high <= 255.0):  # also false for NaN
        raise ValueError(
            f"float pixels run from {low:g} to {high:g}; 0 … 1 or 0 … 255 is understood, save it with 8 bits"
        )
    grey = Image.new("L", image.size)
    for box in _tiles(image):
        values = np.asarray(image.crop(box))
        levels = values * 255.0 if high <= 1.0 else values
        grey.paste(Image.fromarray(np.floor(levels + 0.5).astype(np.uint8)), box[:2])
    return grey


def _extremes(image: Image.Image) -> tuple[float, float]:
    """Returns the least and the largest value; NaN where one of them is."""
    low, high = np.inf, -np.inf
    for box in _tiles(image):
        values = np.asarray(image.crop(box))
        low, high = np.minimum(low, values.min()), np.maximum(high, values.max())
    return float(low), float(high)
