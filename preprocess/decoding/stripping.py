"""Removes the metadata of JPEG and PNG files before they are decoded, except what says how they are turned.

Pillow reads metadata that training does not need, with a warning for each damaged field.
"""

import re
import struct
from collections.abc import Sequence

from loopfeed.preprocess.decoding.known_formats import PNG_SIGNATURE
from loopfeed.preprocess.decoding.orientation import (
    EXIF_HEADER,
    PNG_KEYWORDS,
    XMP_HEADER,
    choose_orientation,
    parse_raw_profile,
    png_text,
)

# The chunks that a PNG decoder needs; all others (text, profiles, animation) are metadata.
_PNG_PIXEL_CHUNKS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})

_PNG_TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt"})

_PNG_RGB = 2

# A marker with a length field: not a stuffed or fill byte (00, FF), TEM (01), RST0–7, SOI, EOI (D0–D9). Matched in C in
# one pass: a Python loop over 32 MiB of fill bytes blocked all other threads for 20 s.
_JPEG_SEGMENT = re.compile(rb"\xff[^\x00\x01\xd0-\xd9\xff]")
# Pillow reads junk byte by byte, and segments and chunks one by one, in Python.
_MAX_JPEG_JUNK_BYTES = 2**16
_MAX_PARTS = 2**16
_JPEG_START_OF_SCAN = 0xDA
_JPEG_APP1 = 0xE1
# APP1–APP13, APP15 and comments are metadata. APP0 (JFIF) and APP14 (Adobe) define the colour transform and are kept.
_JPEG_METADATA_MARKERS = frozenset({*range(0xE1, 0xEE), 0xEF, 0xFE})


def strip_jpeg(encoded: bytes) -> tuple[bytes, int]:
    """Remove the metadata segments of a JPEG file.

    Junk between segments is kept: Pillow skips it, and the decoder itself then refuses a damaged file.

    Returns:
        The file without comments, EXIF, XMP, profiles and thumbnails, and the orientation (1 to 8).

    Raises:
        ValueError: there are more segments or junk bytes before the pixels than allowed.
    """
    content, exif, xmp = split_jpeg(encoded)
    return content, choose_orientation(exif, xmp)


def split_jpeg(encoded: bytes) -> tuple[bytes, bytes | None, bytes | None]:
    """Return a JPEG file without its metadata, its EXIF data and its XMP packet; raise ValueError as `strip_jpeg`."""
    kept = [(0, 2)]
    exif: bytes | None = None
    xmp: bytes | None = None
    position = copied = 2
    junk_bytes = num_segments = 0
    while position < len(encoded):
        found = _JPEG_SEGMENT.search(encoded, position)
        start = found.start() if found else len(encoded)
        junk_bytes += start - position
        num_segments += 1
        if junk_bytes > _MAX_JPEG_JUNK_BYTES or num_segments > _MAX_PARTS:
            raise ValueError(
                f"{junk_bytes} bytes of junk and {num_segments} segments come before the pixels, but at most "
                f"{_MAX_JPEG_JUNK_BYTES} and {_MAX_PARTS} are allowed; save the image again"
            )
        if start + 4 > len(encoded) or encoded[start + 1] == _JPEG_START_OF_SCAN:
            break
        marker = encoded[start + 1]
        cut = start
        while cut > position and encoded[cut - 1] == 0xFF:  # fill bytes belong to the marker that they precede
            cut -= 1
        position = start + 2 + int.from_bytes(encoded[start + 2 : start + 4])
        if marker in _JPEG_METADATA_MARKERS and position <= len(encoded):
            payload = encoded[start + 4 : position]
            if marker == _JPEG_APP1 and exif is None and payload.startswith(EXIF_HEADER):
                exif = payload
            if marker == _JPEG_APP1 and payload.startswith(XMP_HEADER):
                xmp = payload
            kept.append((copied, cut))
            copied = position
    kept.append((copied, len(encoded)))
    return _joined(encoded, kept), exif, xmp


def strip_png(encoded: bytes) -> tuple[bytes, int]:
    """Remove the ancillary chunks of a PNG file.

    Returns:
        The file with only its header, palette, transparency and pixels, and the orientation (1 to 8).

    Raises:
        ValueError: a chunk is longer than the rest of the file, there are more chunks than allowed, or a 16-bit colour
            is marked as transparent, of which Pillow compares only 8 bits.
    """
    content, exif, raw_profile, xmp = split_png(encoded)
    return content, choose_orientation(raw_profile if exif is None else exif, xmp)


def split_png(encoded: bytes, *, is_cut: bool = False) -> tuple[bytes, bytes | None, bytes | None, bytes | None]:
    """Return a PNG file without its metadata, its EXIF data, those of its raw profile, and its XMP packet.

    With ``is_cut``, a truncated pixel chunk is kept.

    Raises:
        ValueError: as `strip_png`.
    """
    kept = [(0, len(PNG_SIGNATURE))]
    exif: bytes | None = None
    texts: dict[bytes, tuple[bytes, bytes]] = {}
    position = len(PNG_SIGNATURE)
    num_chunks = 0
    while position + 8 <= len(encoded):
        length, kind = struct.unpack_from(">I4s", encoded, position)
        stop = position + 12 + length
        num_chunks += 1
        if num_chunks > _MAX_PARTS:
            raise ValueError(f"it has more than {_MAX_PARTS} chunks; save the image again")
        if kind in _PNG_PIXEL_CHUNKS:
            if stop - 4 > len(encoded) and not is_cut:
                left = len(encoded) - position - 8
                raise ValueError(
                    f"its chunk {kind.decode()} is truncated: its length is {length} bytes, but only {left} are left; "
                    "download the file again"
                )
            kept.append((position, stop))
        elif kind == b"eXIf":
            exif = encoded[position + 8 : stop - 4]
        elif kind in _PNG_TEXTS and stop <= len(encoded):
            for keyword in PNG_KEYWORDS:
                if encoded.startswith(keyword + b"\0", position + 8, stop - 4):
                    texts[keyword] = kind, encoded[position + 9 + len(keyword) : stop - 4]
        if kind == b"tRNS" and png_depth_and_colour(encoded) == (16, _PNG_RGB):
            raise ValueError("a 16-bit colour is marked as transparent (tRNS); save the image with an alpha channel")
        position = stop
    # The last ones count. No others are unpacked, of which a small file may have thousands.
    raw_profile, xmp = (png_text(*texts[keyword]) if keyword in texts else None for keyword in PNG_KEYWORDS)
    return _joined(encoded, kept), exif, None if raw_profile is None else parse_raw_profile(raw_profile), xmp


def _joined(encoded: bytes, parts: Sequence[tuple[int, int]]) -> bytes:
    """Concatenate the given (start, stop) parts of a file; return the file itself if they cover all of it.

    The parts are in ascending order. A file may have 512 MiB, so it is copied at most once.
    """
    ends = (0, *(stop for _, stop in parts))
    if all(start == end for (start, _), end in zip(parts, ends, strict=False)) and ends[-1] >= len(encoded):
        return encoded
    whole = memoryview(encoded)
    return b"".join(whole[start:stop] for start, stop in parts)


def png_depth_and_colour(encoded: bytes) -> tuple[int, int]:
    """Return the bits per channel and the colour type of a PNG file from its header, which is the first chunk."""
    return encoded[24], encoded[25]
