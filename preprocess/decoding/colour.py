"""Conversion of images from any Pillow colour mode to 8-bit grey or RGB.

Colour profiles are not applied: the values in the file are the values in the shard, as in every ImageNet pipeline.

Images are converted tile by tile, so that a conversion needs only a few MB in addition to the image and its result.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from loopfeed.preprocess.decoding.levels import Levels
from loopfeed.preprocess.decoding.notes import DecodeNotes

_TILE_PIXELS = 2**20
_MOST_16_BITS = 65535


@dataclass(frozen=True)
class DeepValues:
    """What is known of the values of an image that has more than 8 bits per channel in its file.

    Attributes:
        white: the largest value of the range that the file names; None if it names none.
        low_bytes: the low bytes of 16-bit colour, of which the image itself has the high bytes; same mode and size.
            None for other images, and for those that nothing scales.
        is_negative: whether the smallest of grey values is white.
        is_unsigned: whether the values are unsigned integers of 32 bits, those of the image their bits.
    """

    white: int | None = None
    low_bytes: Image.Image | None = None
    is_negative: bool = False
    is_unsigned: bool = False


class LevelsError(ValueError):
    """Error raised if only `--levels` can say which values of an image are black and white."""


def to_grey_or_rgb(
    image: Image.Image,
    levels: Levels | None = None,
    deep: DeepValues | None = None,
    note: Callable[[DecodeNotes], None] = lambda _: None,
) -> Image.Image:
    """Convert an image to mode "L" (8-bit grey) or "RGB".

    - Transparent images are composited on white, as a viewer shows them; Pillow's own `convert("RGB")` would expose the
      arbitrary colour values of transparent pixels.
    - CMYK becomes (255 − ink) · (255 − black) / 255. Pillow has already undone Adobe's inverted JPEG inks.
    - Values of more than 8 bits are scaled: those of ``levels`` to 0 … 255 or, without them, 0 … the largest value that
      the file names, else 0 … 65535, rounded. A file with larger values than it names has the range 0 … 65535: PNG
      prescribes that samples of fewer bits are scaled to 16. For 16-bit colour in this range, Pillow has already kept
      only the high byte, which differs by at most one level.
    - Floats in 0 … 1 are scaled to 0 … 255, or those of ``levels``.

    Args:
        image: the image.
        levels: the values of an image of more than 8 bits, or of floats, that become black and white.
        deep: what is known of the values if the file has more than 8 bits per channel, else None.
        note: called with what a pack should say about the image.

    Raises:
        LevelsError: without ``levels``, values are outside of these ranges.
        ValueError: a float is NaN, or Pillow cannot convert the mode to RGB.
    """
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_integers(image, levels, deep or DeepValues(), note)
    if image.mode == "F":
        return _from_floats(image, levels, note)
    if deep is not None and image.mode in ("RGB", "RGBA"):
        image = _from_deep_colour(image, levels, deep, note)
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        return image
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


def _from_integers(
    image: Image.Image, levels: Levels | None, deep: DeepValues, note: Callable[[DecodeNotes], None]
) -> Image.Image:
    kind = np.uint32 if deep.is_unsigned else None
    low, high = _extremes(image, kind)
    if deep.is_negative or (deep.is_unsigned and high >= 2**31):
        note(DecodeNotes(num_changed=1))
    scale = levels or _scale_of(low, high, deep.white, note)
    if levels is not None:
        note(DecodeNotes(num_clipped=low < levels.low or high > levels.high))
    if low < 0 or high > _MOST_16_BITS:
        lookup = None
    else:
        lookup = scale.scale(np.arange(_MOST_16_BITS + 1))
        transparent = image.info.get("transparency")
        if transparent is not None and 0 <= transparent <= _MOST_16_BITS:
            lookup[transparent] = 255
    grey = Image.new("L", image.size)
    for box in _tiles(image):
        values = _values(image, box, kind)
        scaled = scale.scale(values) if lookup is None else lookup[values]
        grey.paste(Image.fromarray(255 - scaled if deep.is_negative else scaled), box[:2])
    return grey


def _scale_of(low: float, high: float, white: int | None, note: Callable[[DecodeNotes], None]) -> Levels:
    """Return the levels of an image with integers from ``low`` to ``high``, for which none were given."""
    if low < 0 or high > _MOST_16_BITS:
        raise LevelsError(
            f"integer pixel values range from {low:.0f} to {high:.0f}, but without --levels only 0 to {_MOST_16_BITS} "
            f"are supported; give the values that are black and white in all images, such as --levels "
            f"{low:.0f}:{max(high, low + 1):.0f}"
        )
    if white is not None and high <= white:
        note(DecodeNotes(num_declared=1, white_min=white, white_max=white, num_changed=white != _MOST_16_BITS))
        return Levels(0, white)
    note(DecodeNotes(num_deep=1, deep_max=int(high)))
    return Levels(0, _MOST_16_BITS)


def _from_deep_colour(
    image: Image.Image, levels: Levels | None, deep: DeepValues, note: Callable[[DecodeNotes], None]
) -> Image.Image:
    """Return colour of 16 bits, of which ``image`` has the high bytes, as 8 bits; transparency is kept."""
    if deep.low_bytes is None:
        if deep.white is None:
            counts = np.array(_colour_bands(image).histogram()).reshape(3, 256).sum(axis=0)
            note(DecodeNotes(num_deep=1, deep_max=int(np.flatnonzero(counts)[-1]) * 257))
        return image
    high = 0
    for box in _tiles(image):
        high = max(high, int(_join_bytes(image, deep.low_bytes, box).max()))
    scale = levels or _scale_of(0, high, deep.white, note)
    if levels is not None:
        note(DecodeNotes(num_clipped=high > levels.high))
    elif scale.high == _MOST_16_BITS:
        return image
    lookup, scaled = scale.scale(np.arange(_MOST_16_BITS + 1)), image.copy()
    for box in _tiles(image):
        colour = Image.fromarray(lookup[_join_bytes(image, deep.low_bytes, box)])
        if image.mode == "RGBA":
            colour.putalpha(image.crop(box).getchannel("A"))
        scaled.paste(colour, box[:2])
    return scaled


def _colour_bands(image: Image.Image) -> Image.Image:
    return image.convert("RGB") if image.mode == "RGBA" else image


def _join_bytes(high: Image.Image, low: Image.Image, box: tuple[int, int, int, int]) -> NDArray[np.uint16]:
    """Return the colours in a box as uint16 ``[h, w, 3]``."""
    first, second = (np.asarray(_colour_bands(each.crop(box))).astype(np.uint16) for each in (high, low))
    return (first << 8 | second).astype(np.uint16)


def _from_floats(image: Image.Image, levels: Levels | None, note: Callable[[DecodeNotes], None]) -> Image.Image:
    low, high = _extremes(image)
    if np.isnan(low) or (levels is None and not (np.isfinite(low) and np.isfinite(high))):
        raise ValueError(f"float pixel values range from {low:g} to {high:g}; save the image with finite values")
    if levels is not None:
        note(DecodeNotes(num_clipped=low < levels.low or high > levels.high))
    elif low < 0.0 or high > 1.0:
        raise LevelsError(
            f"float pixel values range from {low:g} to {high:g}, but without --levels only 0 to 1 are supported; give "
            f"the values that are black and white in all images, such as --levels {_usual_levels(low, high)}"
        )
    grey = Image.new("L", image.size)
    for box in _tiles(image):
        values = np.asarray(image.crop(box))
        # Without levels in the arithmetic of their 32 bits, as in every version.
        scaled = np.floor(values * 255.0 + 0.5).astype(np.uint8) if levels is None else levels.scale(values)
        grey.paste(Image.fromarray(scaled), box[:2])
    return grey


def _usual_levels(low: float, high: float) -> Levels:
    """Return the usual range that contains the values of an image, or that of the image itself."""
    usual = (Levels(0, 255), Levels(0, _MOST_16_BITS))
    fitting = next((each for each in usual if low >= each.low and high <= each.high), None)
    return fitting or Levels(float(np.floor(low)), float(np.floor(high) + 1))


def _values(image: Image.Image, box: tuple[int, int, int, int], kind: type[np.uint32] | None = None) -> NDArray[Any]:
    """Return the values in a box, those whose bits are of another type as that type."""
    values = np.asarray(image.crop(box))
    return values if kind is None else values.view(kind)


def _extremes(image: Image.Image, kind: type[np.uint32] | None = None) -> tuple[float, float]:
    """Return the smallest and the largest value of the image; both are NaN if any value is NaN."""
    low, high = np.inf, -np.inf
    for box in _tiles(image):
        values = _values(image, box, kind)
        low, high = np.minimum(low, values.min()), np.maximum(high, values.max())
    return float(low), float(high)
