"""Finds out what a file says about values of more than 8 bits, and reads the bytes of them that Pillow drops.

Of 16-bit colour, Pillow keeps the high bytes. The low bytes are those that it keeps if told the other byte order.
"""

import re
import struct
import sys
from typing import Any

from PIL import Image, ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from loopfeed.preprocess.decoding.box_formats import JPEG_2000, codestream_of
from loopfeed.preprocess.decoding.colour import DeepValues
from loopfeed.preprocess.decoding.levels import Levels
from loopfeed.preprocess.decoding.tiff_samples import (
    bits_of,
    has_planes,
    is_negative,
    is_unsigned,
    largest,
    planes_remedy,
)
from loopfeed.preprocess.decoding.truncation import Load

_MOST_16_BITS = 65535
_PNG_FIRST_CHUNK, _PNG_DEPTH_AT, _PNG_COLOUR_AT = 8, 24, 25
# PNG colour type → the number of channels whose significant bits count, without alpha.
_PNG_COLOURS = {0: 1, 2: 3, 4: 1, 6: 3}
_TIFF_MAX_VALUE = 281
_PPM_MAX_VALUE = re.compile(rb"P[2356]\s(?:(?:\s|#[^\r\n]*[\r\n])*?\d{1,10}){2}(?:\s|#[^\r\n]*[\r\n])*?(\d{1,10})\s")
_NATIVE, _OTHER = ("L", "B") if sys.byteorder == "little" else ("B", "L")
# Pillow's raw mode for the high bytes → that for the low bytes.
_LOW_BYTES = {
    f"{mode};16{order}": f"{mode};16{other}"
    for mode in ("RGB", "RGBA", "RGBX", *"RGBA")
    for order, other in (("L", "B"), ("B", "L"), ("N", _OTHER))
}
_GREY_ALPHA = "LA;16B"


def values_of_file(encoded: bytes, name: str, image: Image.Image) -> DeepValues | None:
    """Return what a file says about its values if they have more than 8 bits, else None; without their low bytes.

    Args:
        encoded: the file, as it was given.
        name: the name of its format.
        image: the decoded image.
    """
    if name == "PNG" and encoded[_PNG_DEPTH_AT] > 8:
        return DeepValues(_png_white(encoded))
    if name == JPEG_2000 and image.mode == "I;16":
        bits = codestream_of(encoded).bits[0]
        return DeepValues(2**bits - 1 if bits < 16 else None)
    if isinstance(image, TiffImageFile):
        bits = bits_of(image)
        if bits > 8:
            most = largest(image.tag_v2.get(_TIFF_MAX_VALUE)) or (2**bits - 1 if bits < 16 else 0)
            white = most if 0 < most <= _MOST_16_BITS else None
            return DeepValues(white, is_negative=is_negative(image), is_unsigned=is_unsigned(image))
    if name == "PPM" and (found := _PPM_MAX_VALUE.match(encoded, 0, 1 << 16)) is not None and int(found[1]) > 255:
        # The values have been scaled to 65535 or, of colour, to 255.
        return DeepValues(None if int(found[1]) == _MOST_16_BITS else _MOST_16_BITS)
    return None


def needs_low_bytes(image: Image.Image, levels: Levels | None, white: int | None) -> bool:
    """Return whether 16-bit colour cannot be scaled without its low bytes, or can be and names its largest value."""
    if levels is None and (white == _MOST_16_BITS or white is None):
        return white is not None and image.mode in ("RGB", "RGBA") and not _is_read_by_plane(image)
    return image.mode in ("RGB", "RGBA", "CMYK")


def _is_read_by_plane(image: Image.Image) -> bool:
    """Return whether libtiff reads an image plane by plane, for which Pillow ignores the raw mode."""
    return isinstance(image, TiffImageFile) and image.use_load_libtiff and has_planes(image)


def read_low_bytes(content: bytes, load: Load) -> Image.Image:
    """Return the low bytes of 16-bit colour, in an image like that of the high bytes.

    Raises:
        ValueError: the form of the colour is not supported.
        Exception: as ``load``.
    """
    is_grey_alpha = False

    def take_low_bytes(image: ImageFile.ImageFile) -> None:
        nonlocal is_grey_alpha
        if isinstance(image, TiffImageFile) and _is_read_by_plane(image):
            raise ValueError(f"compressed 16-bit colour with separate planes cannot be scaled; {planes_remedy(image)}")
        tiles: list[Any] = []
        for decoder, extents, offset, args in image.tile:
            rawmode = args if isinstance(args, str) else (args or ("",))[0]
            is_grey_alpha = rawmode == _GREY_ALPHA
            low = "RGBA" if is_grey_alpha else _LOW_BYTES.get(str(rawmode))
            if low is None:
                raise ValueError(
                    f"16-bit colour in the form {rawmode or image.mode} cannot be scaled; save the image as RGB with 8 "
                    "or 16 bits per channel"
                )
            tiles.append(
                ImageFile._Tile(decoder, extents, offset, low if isinstance(args, str) else (low, *(args or ())[1:]))
            )
        image.tile = tiles

    low = load(content, take_low_bytes)
    if is_grey_alpha:  # its four bytes were read as four channels
        _, grey, _, alpha = low.split()
        return Image.merge("RGBA", (grey, grey, grey, alpha))
    return low


def _png_white(encoded: bytes) -> int | None:
    """Return the largest value of the significant bits (sBIT) of a 16-bit PNG file, None if it does not state them."""
    position = _PNG_FIRST_CHUNK
    while position + 8 <= len(encoded):
        length, kind = struct.unpack_from(">I4s", encoded, position)
        if kind == b"sBIT":
            bits = max(
                encoded[position + 8 : position + 8 + min(length, _PNG_COLOURS.get(encoded[_PNG_COLOUR_AT], 0))],
                default=0,
            )
            return 2**bits - 1 if 0 < bits <= 16 else None
        if kind in (b"IDAT", b"PLTE"):
            return None
        position += 12 + length
    return None
