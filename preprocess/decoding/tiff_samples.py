"""Corrects how Pillow reads the samples of a TIFF file that it opens but would misread.

Pillow's plugin chooses a raw mode by the tags, and then changes it: of samples in separate planes it keeps one letter,
which means 8 bits, and of what libtiff decodes, always in the machine's byte order, it corrects only unsigned 16 bits.
"""

from typing import Any

from PIL.TiffImagePlugin import TiffImageFile

_BITS, _PHOTOMETRIC, _FILL_ORDER, _SAMPLES, _PLANES = 258, 262, 266, 277, 284
_TILE_WIDTH, _EXTRA_SAMPLES, _SAMPLE_FORMAT = 322, 338, 339
_WHITE_IS_ZERO, _LOW_BIT_FIRST, _SEPARATE, _UNSIGNED = 0, 2, 2, 1
# The raw mode in the byte order of the file → that in the order of the machine. Pillow corrects those of unsigned 16
# bits.
_NATIVE = {
    "I;16S": "I;16NS",
    "I;16BS": "I;16NS",
    "I;32S": "I;32NS",
    "I;32BS": "I;32NS",
    "F;32F": "F;32NF",
    "F;32BF": "F;32NF",
}
# ExtraSamples → its name in tifffile; Pillow takes a fourth channel that the file does not name for alpha.
_EXTRA_NAMES = {0: "unspecified", 1: "assocalpha"}


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
        image.tile = [each._replace(args=(_NATIVE.get(each.args[0], each.args[0]), *each.args[1:])) for each in before]
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
