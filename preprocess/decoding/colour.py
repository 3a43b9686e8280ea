"""Conversion of images from any Pillow colour mode to 8-bit grey or RGB.

Colour profiles are not applied: the values in the file are the values in the shard, as in every ImageNet pipeline.

Images are converted tile by tile, so that a conversion needs only a few MB in addition to the image and its result.
"""

from collections.abc import Iterator

import numpy as np
from PIL import Image

_TILE_PIXELS = 2**20


def to_grey_or_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to mode "L" (8-bit grey) or "RGB".

    - Transparent images are composited on white, as a viewer shows them; Pillow's own `convert("RGB")` would expose the
      arbitrary colour values of transparent pixels.
    - CMYK becomes (255 − ink) · (255 − black) / 255. Pillow has already undone Adobe's inverted JPEG inks.
    - Grey of more than 8 bits is scaled, not clipped: 0 … 65535 to 0 … 255, rounded; a 32-bit integer must be in that
      range. For 16-bit colour and 16-bit grey with alpha, Pillow has already kept only the high byte, which differs
      by at most one level.
    - Floats in 0 … 1 are scaled to 0 … 255; floats in 0 … 255 are used unchanged.

    Raises:
        ValueError: values are outside these ranges, or Pillow cannot convert the mode to RGB.
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
    """Yield boxes (left, top, right, bottom) that cover the image and have at most `_TILE_PIXELS` pixels each."""
    width = min(image.width, _TILE_PIXELS)
    height = max(1, _TILE_PIXELS // width)
    for top in range(0, image.height, height):
        for left in range(0, image.width, width):
            yield left, top, min(left + width, image.width), min(top + height, image.height)


def _on_white(image: Image.Image) -> Image.Image:
    composited = Image.new("RGB", image.size)
    for box in _tiles(image):
        rgba = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        composited.paste(Image.alpha_composite(white, rgba).convert("RGB"), box[:2])
    return composited


def _from_sixteen_bits(image: Image.Image) -> Image.Image:
    low, high = _extremes(image) if image.mode == "I" else (0, 65535)
    if low < 0 or high > 65535:
        raise ValueError(
            f"integer pixel values range from {low:.0f} to {high:.0f}, but only 0 to 65535 are supported; save the "
            "image with 8 or 16 bits per channel"
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
            f"float pixel values range from {low:g} to {high:g}, but only 0 to 1 or 0 to 255 are supported; save the "
            "image with 8 bits per channel"
        )
    grey = Image.new("L", image.size)
    for box in _tiles(image):
        values = np.asarray(image.crop(box))
        levels = values * 255.0 if high <= 1.0 else values
        grey.paste(Image.fromarray(np.floor(levels + 0.5).astype(np.uint8)), box[:2])
    return grey


def _extremes(image: Image.Image) -> tuple[float, float]:
    """Return the smallest and the largest value of the image; both are NaN if any value is NaN."""
    low, high = np.inf, -np.inf
    for box in _tiles(image):
        values = np.asarray(image.crop(box))
        low, high = np.minimum(low, values.min()), np.maximum(high, values.max())
    return float(low), float(high)
