"""Finds out what a file says about values of more than 8 bits, and corrects what Pillow drops or misreads of them.

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
from loopfeed.preprocess.decoding.truncation import Load

_BITS, _PHOTOMETRIC, _FILL_ORDER, _SAMPLES, _PLANES = 258, 262, 266, 277, 284
_TILE_WIDTH, _EXTRA_SAMPLES, _SAMPLE_FORMAT = 322, 338, 339
_WHITE_IS_ZERO, _LOW_BIT_FIRST, _SEPARATE, _UNSIGNED = 0, 2, 2, 1
# The raw mode in the byte order of the file → that in the order of the machine. Pillow corrects those of unsigned 16
# bits.
_NATIVE_MODES = {
    "I;16S": "I;16NS",
    "I;16BS": "I;16NS",
    "I;32S": "I;32NS",
    "I;32BS": "I;32NS",
    "F;32F": "F;32NF",
    "F;32BF": "F;32NF",
}
# ExtraSamples → its name in tifffile; Pillow takes a fourth channel that the file does not name for alpha.
_EXTRA_NAMES = {0: "unspecified", 1: "assocalpha"}

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


def bits_of(image: TiffImageFile) -> int:
    """Return the largest number of bits per sample."""
    return largest(image.tag_v2.get(_BITS)) or 1


def is_negative(image: TiffImageFile) -> bool:
    """Return whether the smallest value is white, and Pillow does not invert the values, as it does those of 8 bits."""
    return bits_of(image) > 8 and image.tag_v2.get(_PHOTOMETRIC) == _WHITE_IS_ZERO


def is_unsigned(image: TiffImageFile) -> bool:
    """Return whether the file's integers of 32 bits are unsigned; those of Pillow's images are signed."""
    return image.mode == "I" and largest(image.tag_v2.get(_SAMPLE_FORMAT, _UNSIGNED)) == _UNSIGNED


def has_planes(image: TiffImageFile) -> bool:
    """Return whether the channels are stored one after the other."""
    return bool(image.tag_v2.get(_PLANES) == _SEPARATE and image.tag_v2.get(_SAMPLES, 1) != 1)


# Pillow's plugin chooses a raw mode by the tags, and then changes it: of samples in separate planes it keeps one
# letter, which means 8 bits, and of what libtiff decodes, always in the machine's byte order, it corrects only
# unsigned 16 bits.
def correct_samples(image: TiffImageFile) -> bool:
    """Correct how the samples of an opened file will be decoded; return whether Pillow would have misread them.

    Raises:
        ValueError: Pillow cannot read them.
    """
    if image.mode == "F" and is_negative(image):
        raise ValueError(
            "its float values have white at 0 (PhotometricInterpretation 0), but only those with black at 0 are "
            "supported; save 1 - values, with PhotometricInterpretation 1"
        )
    before: list[Any] = image.tile
    if image.use_load_libtiff:
        if has_planes(image) and image.mode in ("LA", "La", "PA"):
            raise _planes_error(image)  # Pillow leaves the alpha channel out
        image.tile = [
            each._replace(args=(_NATIVE_MODES.get(each.args[0], each.args[0]), *each.args[1:])) for each in before
        ]
    elif has_planes(image):
        image.tile = [_read_plane(image, each) for each in before if each.args[0] != ";"]  # a channel without meaning
    elif image.tag_v2.get(_PLANES) == _SEPARATE:
        del image.tag_v2[_PLANES]  # which means nothing for one channel
        image._setup()
    return image.tile != before


def check_alpha(image: TiffImageFile) -> None:
    """Raise ValueError if Pillow has divided the colours of a decoded image by an alpha that was not in them.

    It does so if the channels have separate planes, and the file does not say what the fourth one is.
    """
    is_divided = image.use_load_libtiff and has_planes(image) and _EXTRA_SAMPLES not in image.tag_v2
    if image.mode == "RGBA" and is_divided and image.getchannel("A").getextrema() != (255, 255):
        raise _planes_error(image)


def _read_plane(image: TiffImageFile, tile: Any) -> Any:
    """Return a part of one plane, for which Pillow kept a letter of the raw mode and divided the bytes of a row."""
    channel, stride, step = tile.args
    bits = bits_of(image)
    if image.tag_v2.get(_FILL_ORDER) == _LOW_BIT_FIRST:
        raise _planes_error(image)
    if bits > 8:
        if image.mode not in ("RGB", "RGBA") or channel not in image.mode:
            raise _planes_error(image)
        channel += ";16L" if image.tag_v2.prefix == b"II" else ";16B"
    return tile._replace(args=(channel, image.tag_v2[_TILE_WIDTH] * bits // 8 if stride else 0, step))


def _planes_error(image: TiffImageFile) -> ValueError:
    return ValueError(
        f"{bits_of(image)}-bit {image.mode} with separate planes is not supported; {planes_remedy(image)}"
    )


def planes_remedy(image: TiffImageFile) -> str:
    """Return how to save a file without separate planes."""
    pixels, more = 'imread("old.tif").transpose(1, 2, 0)', ', photometric="minisblack", planarconfig="contig"'
    if image.mode[0] in "LI" and "A" not in image.mode.upper():
        pixels = 'imread("old.tif")[0]'
    elif image.mode == "CMYK":
        more = ', photometric="separated"'
    elif image.mode in ("RGB", "RGBA"):
        more = ', photometric="rgb"'
    if image.tag_v2.get(_SAMPLES) == 4 and image.mode in ("RGB", "RGBA"):
        extra = image.tag_v2.get(_EXTRA_SAMPLES, ())
        more += f', extrasamples=["{_EXTRA_NAMES.get(largest(extra) if extra else 2, "unassalpha")}"]'
    return f'save it without them, in Python with tifffile: imwrite("new.tif", {pixels}{more})'


def largest(value: object) -> int:
    """Return the largest of the integers in a TIFF tag, 0 if it has none."""
    values = value if isinstance(value, tuple) else (value,)
    return max((each for each in values if type(each) is int), default=0)
