"""Turns any of Pillow's colour modes into 8-bit grey or RGB.

Colour profiles are not applied: the numbers in the file are the numbers in the shard, as in every ImageNet pipeline.
"""

import numpy as np
from PIL import Image


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
        return Image.fromarray(_from_sixteen_bits(np.asarray(image), image.info.get("transparency")))
    if image.mode == "F":
        return Image.fromarray(_from_floats(np.asarray(image)))
    if image.has_transparency_data:
        return _on_white(image)
    if image.mode == "1":
        return image.convert("L")
    return image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, rgba).convert("RGB")


def _from_sixteen_bits(values: np.ndarray, transparent: int | None) -> np.ndarray:
    wide = values.astype(np.int64)
    low, high = int(wide.min()), int(wide.max())
    if low < 0 or high > 65535:
        raise ValueError(f"integer pixels run from {low} to {high}; 0 … 65535 is understood, save it with 8 or 16 bits")
    levels = ((wide + 128) // 257).astype(np.uint8)  # 65535 = 255 · 257
    if transparent is not None:
        levels[wide == transparent] = 255
    return levels


def _from_floats(values: np.ndarray) -> np.ndarray:
    low, high = float(values.min()), float(values.max())
    if not (low >= 0.0 and high <= 255.0):  # also false for NaN
        raise ValueError(
            f"float pixels run from {low:g} to {high:g}; 0 … 1 or 0 … 255 is understood, save it with 8 bits"
        )
    levels = values * 255.0 if high <= 1.0 else values
    return np.floor(levels + 0.5).astype(np.uint8)
