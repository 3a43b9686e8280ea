"""Bounds on the cost of decoding a file, checked before Pillow opens it.

Pillow reads some parts of these formats in Python, piece by piece, and some C decoders pass over the whole image once
for each part of a file, so a small file can take minutes or gigabytes. Each bound here limits an image to a few
seconds and is far above what cameras, scanners and programs write.

Pillow's own limit is on the number of pixels, and only `Image.open` applies it. Pillow 13 still takes 29 s for 48 MB of
plain PPM, 19 s for 34 MB of run-length encoded BMP, 8 s for 40 MB of GIF comments, and more than a minute for a PPM of
12 million pixels whose largest value is 1023. Pillow 11.3 has no bound on the tags of a TIFF; Pillow 13 has one.
"""

import re
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np

from loopfeed.preprocess.decoding.box_formats import AVIF, HEIC, JPEG_2000, check_avif, check_jpeg_2000
from loopfeed.preprocess.decoding.hidden_size import TiffTags
from loopfeed.preprocess.decoding.levels import Levels

_MAX_PPM_HEADER_BYTES = 2**16
_PPM_NUMBER = rb"(?:\s|#[^\r\n]*[\r\n])*?(\d{1,10})"
_PPM_HEADER = re.compile(rb"P([1-6])\s" + _PPM_NUMBER + _PPM_NUMBER + rb"(?:" + _PPM_NUMBER + rb")?\s")
# Pillow reads these number by number, 3 MiB per second.
_MAX_PLAIN_PPM_BYTES = 16 * 2**20
_MAX_PLAIN_PPM_COMMENTS = 1_000

_MOST_8_BITS, _MOST_16_BITS = 255, 65535

_MAX_GIF_BLOCKS = 2**16

# Pillow reads these run by run and pads them pixel by pixel.
_MAX_RLE_BMP_BYTES = 16 * 2**20
_MAX_RLE_BMP_PIXELS = 2**24

_MAX_TIFF_ENTRIES = 4096
_MAX_TIFF_NUMBERS = 2**20
_TIFF_BYTE_TYPES = frozenset({1, 2, 7})
_TIFF_TYPE_BYTES: Mapping[int, int] = {
    3: 2, 4: 4, 5: 8, 6: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8,
}  # fmt: skip

# Each scan passes over all coefficients; programs write 10 scans, at most 20.
_ALWAYS_ALLOWED_SCANS = 24
_MAX_SCANNED_PIXELS = 2**31
# However small the picture: of a truncated file, Python looks at each scan.
_MOST_SCANS = 1000
_MAX_JPEG_MARKERS = 2**16
_JPEG_SCAN = b"\xff\xda"
_JPEG_SCANS = re.compile(_JPEG_SCAN)  # half the time of bytes.count
_JPEG_END = 0xD9
_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")


def bounded(encoded: bytes, name: str, *, max_pixels: int, levels: Levels | None = None) -> bytes:
    """Check that a file is cheap to decode, and return either the file itself or an equivalent image for Pillow.

    Args:
        encoded: the file.
        name: the name of its format, as in `loopfeed.preprocess.decoding.box_formats.FORMATS`.
        max_pixels: the largest number of pixels allowed.
        levels: the values that become black and white, if they are given. The values of a PPM file of more than 8 bits
            are then those in the file: grey is left to be scaled, and colour is scaled here.

    Raises:
        ValueError: the file exceeds a bound.
    """
    if name == "PPM":
        return _bounded_ppm(encoded, max_pixels, levels)
    check = _CHECKS.get(name)
    if check is not None:
        with suppress(struct.error, IndexError):  # truncated: the decoder will refuse it
            check(encoded, max_pixels)
    return encoded


def check_jpeg_scans(encoded: bytes, num_pixels: int) -> None:
    """Raise ValueError if a JPEG file has far more scans than any program writes."""
    allowed = max(_ALWAYS_ALLOWED_SCANS, min(_MOST_SCANS, _MAX_SCANNED_PIXELS // max(1, num_pixels)))
    # This count includes markers in metadata and after the image.
    if sum(1 for _ in _JPEG_SCANS.finditer(encoded)) <= allowed:
        return
    position, num_scans = 2, 0
    for _ in range(_MAX_JPEG_MARKERS):
        found = _JPEG_MARKER.search(encoded, position)
        if found is None or encoded[found.start() + 1] == _JPEG_END:
            return
        num_scans += found[0] == _JPEG_SCAN
        if num_scans > allowed:
            break
        start = found.start() + 2
        position = start + max(2, int.from_bytes(encoded[start : start + 2]))
    raise ValueError(f"it has more than {allowed} scans for {num_pixels} pixels; save it as a baseline JPEG")


def _bounded_ppm(encoded: bytes, max_pixels: int, levels: Levels | None) -> bytes:
    found = _PPM_HEADER.match(encoded, 0, _MAX_PPM_HEADER_BYTES)
    if found is None:
        if len(encoded) > _MAX_PPM_HEADER_BYTES:
            raise ValueError(f"its header does not end within {_MAX_PPM_HEADER_BYTES} bytes; save the image again")
        return encoded
    if found[1] in b"123":
        if len(encoded) > _MAX_PLAIN_PPM_BYTES or encoded.count(b"#") > _MAX_PLAIN_PPM_COMMENTS:
            raise ValueError(
                f"in plain ASCII form it may have at most {_MAX_PLAIN_PPM_BYTES} bytes and {_MAX_PLAIN_PPM_COMMENTS} "
                f"comments, but it has {len(encoded)} bytes and {encoded.count(b'#')} comments; save it in "
                "binary form"
            )
        return encoded if levels is None else _plain_with_own_values(encoded, found)
    if found[1] == b"4" or found[4] is None:
        return encoded
    return _at_full_range(encoded, found, max_pixels, levels)


def _plain_with_own_values(encoded: bytes, found: re.Match[bytes]) -> bytes:
    """Return a plain PPM file whose values Pillow does not scale, if it has more than 8 bits."""
    if found[1] == b"1" or found[4] is None or not _MOST_8_BITS < int(found[4]) <= _MOST_16_BITS:
        return encoded
    if found[1] == b"3":
        raise ValueError("colour of 16 bits in plain ASCII form cannot be scaled; save it in binary form")
    return encoded[: found.start(4)] + str(_MOST_16_BITS).encode() + encoded[found.end(4) :]


def _at_full_range(encoded: bytes, found: re.Match[bytes], max_pixels: int, given: Levels | None) -> bytes:
    """Return a binary PPM file with its values rescaled to a maximum of 255 or 65535 and rounded as in Pillow.

    With ``given`` levels, grey of 16 bits keeps its values, and colour of 16 bits is scaled by them.
    """
    width, height, largest = int(found[2]), int(found[3]), int(found[4])
    is_grey = found[1] == b"5"
    given = given if _MOST_8_BITS < largest <= _MOST_16_BITS else None
    if given is not None and is_grey:
        return encoded[: found.start(4)] + str(_MOST_16_BITS).encode() + encoded[found.end(4) :]
    if not 0 < largest < 65536 or largest == 255 or (is_grey and largest == 65535) or width * height > max_pixels:
        return encoded
    kind, full = (">u2", 65535) if largest > 255 else ("u1", 255)
    full = full if is_grey else 255
    num_values = width * height * (1 if is_grey else 3)
    num_there = (len(encoded) - found.end()) // np.dtype(kind).itemsize
    values = np.frombuffer(encoded, kind, min(num_values, num_there), found.end())
    numbers = range(256 if kind == "u1" else 65536)
    levels = np.array([min(full, round(each / largest * full)) for each in numbers], ">u2" if full > 255 else "u1")
    if given is not None:
        levels = given.scale(np.arange(_MOST_16_BITS + 1))
    return b"P%b\n%d %d\n%d\n" % (found[1], width, height, full) + levels[values].tobytes()


def _check_gif(encoded: bytes, max_pixels: int) -> None:  # noqa: ARG001 - all checks take the same arguments
    """Raise ValueError if a GIF file has too many blocks before its first image."""
    flags = encoded[10]
    position = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    is_extension = False
    for _ in range(_MAX_GIF_BLOCKS):
        size = encoded[position]
        if is_extension:
            is_extension = size != 0
            position += 1 + size
        elif size in (0x2C, 0x3B):
            return
        else:
            is_extension = size == 0x21
            position += 2 if is_extension else 1
    raise ValueError(f"more than {_MAX_GIF_BLOCKS} blocks come before its first image; save the image again")


def _check_bmp(encoded: bytes, max_pixels: int) -> None:  # noqa: ARG001 - all checks take the same arguments
    header_bytes, width, height, _, _, compression = struct.unpack_from("<IiiHHI", encoded, 14)
    if header_bytes < 40 or compression not in (1, 2):
        return
    num_pixels = abs(width * height)
    if len(encoded) > _MAX_RLE_BMP_BYTES or num_pixels > _MAX_RLE_BMP_PIXELS:
        raise ValueError(
            f"with run-length encoding it may have at most {_MAX_RLE_BMP_BYTES} bytes and {_MAX_RLE_BMP_PIXELS} "
            f"pixels, but it has {len(encoded)} bytes and {num_pixels} pixels; save it without compression"
        )


def _check_webp(encoded: bytes, max_pixels: int) -> None:
    """Raise ValueError if a WebP canvas is too large, because libwebp allocates it twice before reporting its size."""
    kind = encoded[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(encoded[at : at + 3], "little") + 1 for at in (24, 27))
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", encoded, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = (length & 0x3FFF for length in struct.unpack_from("<HH", encoded, 26))
    else:
        return
    if width * height > max_pixels:
        raise ValueError(f"{width}×{height} is more than the {max_pixels} pixels allowed in one image; make it smaller")


def _check_tiff(encoded: bytes, max_pixels: int) -> None:  # noqa: ARG001 - all checks take the same arguments
    """Raise ValueError if a TIFF file's first image has too many tags, or tags that refer to too many values or bytes.

    Bytes that several tags share are counted once for each tag.
    """
    tags, num_bytes = TiffTags(encoded), 0
    if tags.num_entries > _MAX_TIFF_ENTRIES:
        raise ValueError(
            f"it has {tags.num_entries} tags, more than the {_MAX_TIFF_ENTRIES} allowed; save it without metadata"
        )
    for tag, kind, count, _ in tags:
        if kind not in _TIFF_BYTE_TYPES and count > _MAX_TIFF_NUMBERS:
            raise ValueError(
                f"its tag {tag} has {count} values, more than the {_MAX_TIFF_NUMBERS} allowed; save it again"
            )
        num_bytes += count * _TIFF_TYPE_BYTES.get(kind, 1)
        if num_bytes > len(encoded) + tags.word_bytes * tags.num_entries:
            raise ValueError(
                f"its tags refer to at least {num_bytes} bytes, but the file has only {len(encoded)}; save it again"
            )


_CHECKS: Mapping[str, Callable[[bytes, int], None]] = {
    "GIF": _check_gif,
    "BMP": _check_bmp,
    "WebP": _check_webp,
    "TIFF": _check_tiff,
    AVIF: check_avif,
    HEIC: check_avif,
    JPEG_2000: check_jpeg_2000,
}
