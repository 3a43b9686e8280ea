"""Opens encoded bytes as a Pillow image: the format by its first bytes, the orientation by its EXIF, nothing else.

`Image.open` is deliberately not used. It tries every plugin Pillow has (PostScript through Ghostscript among them),
and it reads metadata that no trainer needs, warning about each damaged field; `warnings.catch_warnings` cannot keep
such a warning from a thread without touching all others. So JPEG and PNG files are handed over with their metadata cut
out, and only the two rare formats whose plugins can still warn are opened one at a time.
"""

import io
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

_ORIENTATION_TAG = 0x0112
_EXIF_HEADER = b"Exif\0\0"

# What a decoder needs of a PNG; all else (text, profiles, animation) is metadata.
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_PIXEL_CHUNKS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})

# JPEG markers without a length field: TEM, RST0–7, SOI, EOI.
_JPEG_BARE_MARKERS = frozenset({0x01, *range(0xD0, 0xDA)})
_JPEG_START_OF_SCAN = 0xDA
_JPEG_APP1 = 0xE1
# APP1–APP13, APP15 and comments are metadata. APP0 (JFIF) and APP14 (Adobe) decide the colour transform and stay.
_JPEG_METADATA_MARKERS = frozenset({*range(0xE1, 0xEE), 0xEF, 0xFE})


@dataclass(frozen=True)
class Format:
    """A file format that is accepted: how it begins, how it is opened, whether its Pillow plugin may warn."""

    name: str
    accepts: Callable[[bytes], bool]
    opener: Callable[[Any], ImageFile.ImageFile]
    may_warn: bool = False


FORMATS = (
    Format("JPEG", lambda head: head.startswith(b"\xff\xd8\xff"), JpegImageFile),
    Format("PNG", lambda head: head.startswith(_PNG_SIGNATURE), PngImageFile),
    Format("WebP", lambda head: head.startswith(b"RIFF") and head[8:12] == b"WEBP", WebPImageFile),
    Format("GIF", lambda head: head.startswith((b"GIF87a", b"GIF89a")), GifImageFile, may_warn=True),
    Format("BMP", lambda head: head.startswith(b"BM"), BmpImageFile),
    Format(
        "TIFF", lambda head: head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")), TiffImageFile, may_warn=True
    ),
    Format("PPM", lambda head: head[:1] == b"P" and head[1:2] in b"123456" and head[2:3].isspace(), PpmImageFile),
)

_WARNING_LOCK = threading.Lock()


@contextmanager
def _pillow_warnings_off() -> Iterator[None]:
    # The filter list belongs to the process, so only one thread at a time may swap it.
    with _WARNING_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sniff(encoded: bytes) -> Format | None:
    """Returns the format that the first bytes announce, or None; file names play no part."""
    head = encoded[:16]
    return next((known for known in FORMATS if known.accepts(head)), None)


def open_pixels(encoded: bytes, known: Format, *, max_pixels: int) -> tuple[Image.Image, int]:
    """Decodes the first frame in the file's own colour mode.

    Args:
        encoded: the file's bytes.
        known: what `sniff` said of them.
        max_pixels: a file that announces more is refused before its pixels are decoded.

    Returns:
        The loaded image, and the EXIF orientation (1 to 8) that is still to be applied.

    Raises:
        ValueError: the image is too large or has no pixels.
        Exception: whatever Pillow makes of damaged bytes.
    """
    orientation = 1
    if known.name == "JPEG":
        encoded, orientation = strip_jpeg(encoded)
    elif known.name == "PNG":
        encoded, orientation = strip_png(encoded)
    with _pillow_warnings_off() if known.may_warn else nullcontext():
        image = known.opener(io.BytesIO(encoded))
        width, height = image.size
        if width < 1 or height < 1:
            raise ValueError(f"the {known.name} header announces {width}×{height} pixels")
        if width * height > max_pixels:
            raise ValueError(f"{width}×{height} is more than the {max_pixels} pixels allowed in one image")
        image.load()
    if known.name == "WebP":
        orientation = exif_orientation(image.info.get("exif", b""))
    return image, orientation  # Pillow itself turns a TIFF the right way up


def exif_orientation(exif: bytes) -> int:
    """Returns the orientation (1 to 8) in an EXIF block; 1, upright, where the block is damaged or does not say."""
    tiff = exif.removeprefix(_EXIF_HEADER)
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(order + "I", tiff, 4)
        (num_entries,) = struct.unpack_from(order + "H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * num_entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHI", tiff, entry)
            if tag == _ORIENTATION_TAG and count == 1 and kind in (3, 4):
                (value,) = struct.unpack_from(order + ("H" if kind == 3 else "I"), tiff, entry + 8)
                return value if 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1


def strip_jpeg(encoded: bytes) -> tuple[bytes, int]:
    """Cuts metadata segments out of a JPEG file.

    Junk between segments is kept: Pillow steps over it, and a damaged file is then refused by the decoder itself.

    Returns:
        The file without comments, EXIF, XMP, profiles and thumbnails, and the EXIF orientation (1 to 8).
    """
    kept = [encoded[:2]]
    orientation = None
    position = copied = 2
    while (start := encoded.find(b"\xff", position)) >= 0:
        position = start
        while encoded[position + 1 : position + 2] == b"\xff":  # fill bytes belong to the marker they precede
            position += 1
        if position + 4 > len(encoded):
            break
        marker = encoded[position + 1]
        if marker == 0 or marker in _JPEG_BARE_MARKERS:
            position += 2
            continue
        if marker == _JPEG_START_OF_SCAN:
            break
        stop = position + 2 + int.from_bytes(encoded[position + 2 : position + 4])
        if marker in _JPEG_METADATA_MARKERS and stop <= len(encoded):
            payload = encoded[position + 4 : stop]
            if marker == _JPEG_APP1 and orientation is None and payload.startswith(_EXIF_HEADER):
                orientation = exif_orientation(payload)
            kept.append(encoded[copied:start])
            copied = stop
        position = stop
    kept.append(encoded[copied:])
    return b"".join(kept), orientation or 1


def strip_png(encoded: bytes) -> tuple[bytes, int]:
    """Cuts ancillary chunks out of a PNG file.

    Returns:
        The file with its header, palette, transparency and pixels alone, and the EXIF orientation (1 to 8).
    """
    kept = [_PNG_SIGNATURE]
    orientation = 1
    position = len(_PNG_SIGNATURE)
    while position + 8 <= len(encoded):
        length, kind = struct.unpack_from(">I4s", encoded, position)
        stop = position + 12 + length
        if kind in _PNG_PIXEL_CHUNKS:
            kept.append(encoded[position:stop])
        elif kind == b"eXIf":
            orientation = exif_orientation(encoded[position + 8 : stop - 4])
        position = stop
    return b"".join(kept), orientation
