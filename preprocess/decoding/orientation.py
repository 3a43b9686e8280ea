"""Finds out how an image must be turned to stand upright, from where Pillow's `ImageOps.exif_transpose` looks for it.

That is the EXIF orientation or, if the EXIF data have none, the first `tiff:Orientation` of the XMP packet. In a PNG
without a chunk eXIf, the EXIF data are those of the text "Raw profile type exif", which ImageMagick writes.
"""

import re
import struct
import zlib
from contextlib import suppress

from PIL import Image

_ORIENTATION_TAG = 0x0112
# In either byte order: cameras write both, and Pillow accepts both.
_TIFF_MAGIC = (b"*\0", b"\0*")
EXIF_HEADER = b"Exif\0\0"
XMP_HEADER = b"http://ns.adobe.com/xap/1.0/\0"
"""The beginning of an APP1 segment of a JPEG file that holds an XMP packet."""

_XMP = re.compile(rb'tiff:Orientation(="|>)([0-9])')
PNG_KEYWORDS = (b"Raw profile type exif", b"XML:com.adobe.xmp")
"""The keywords of the PNG texts that hold EXIF data and an XMP packet."""
# Pillow's limit for a text; more is no packet of a camera or an editor.
_MAX_TEXT_BYTES = 1 << 20
# The name, its length and the profile in hexadecimal digits, each on its own lines.
_PROFILE_HEADER_LINES = 3

# EXIF orientation → the transposition that makes the image upright (TIFF 6.0, tag 274).
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def turn_upright(image: Image.Image, orientation: int) -> Image.Image:
    """Return the image turned upright; the image itself for 1 and for values without a meaning."""
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def choose_orientation(exif: bytes | None, xmp: bytes | None) -> int:
    """Return the orientation (1 to 8) of an image with these EXIF data and this XMP packet, 1 if neither has one."""
    found = None if exif is None else exif_orientation(exif)
    if found is None and xmp and (match := _XMP.search(xmp)) is not None:
        found = int(match[2])
    return found if found in _UPRIGHT else 1


def exif_orientation(exif: bytes) -> int | None:
    """Return the orientation (1 to 8) in an EXIF block, None if it is damaged or has none.

    An orientation without a meaning is 1 (upright).
    """
    tiff = exif.removeprefix(EXIF_HEADER)
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None or tiff[2:4] not in _TIFF_MAGIC:
        return None
    with suppress(struct.error):
        (directory,) = struct.unpack_from(order + "I", tiff, 4)
        (num_entries,) = struct.unpack_from(order + "H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * num_entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHI", tiff, entry)
            if tag == _ORIENTATION_TAG and count == 1 and kind in (3, 4):
                (value,) = struct.unpack_from(order + ("H" if kind == 3 else "I"), tiff, entry + 8)
                return value if 1 <= value <= 8 else 1
    return None


def png_text(kind: bytes, content: bytes) -> bytes | None:
    """Return the text of a PNG text chunk (tEXt, zTXt or iTXt) whose content follows its keyword and a NUL byte.

    A text that is damaged, or longer than 1 MiB, is None.
    """
    is_compressed = kind == b"zTXt"
    text = content[1:] if is_compressed else content
    if kind == b"iTXt":
        parts = content[2:].split(b"\0", 2)  # the language, the keyword in it, and the text
        if len(parts) < 3:
            return None
        is_compressed, text = content[:1] == b"\1", parts[2]
    if not is_compressed:
        return text if len(text) <= _MAX_TEXT_BYTES else None
    unpacked = zlib.decompressobj()
    try:
        text = unpacked.decompress(text, _MAX_TEXT_BYTES)
    except zlib.error:
        return None
    return None if unpacked.unconsumed_tail else text


def parse_raw_profile(text: bytes) -> bytes | None:
    """Return the EXIF data in the text "Raw profile type exif", None if it is damaged."""
    with suppress(ValueError):
        digits = b"".join(text.split(b"\n", _PROFILE_HEADER_LINES)[_PROFILE_HEADER_LINES:])
        return bytes.fromhex(digits.replace(b"\n", b"").decode("ascii"))
    return None
