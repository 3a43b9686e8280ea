"""Reads JPEG XL with the package of the extra `jxl`: as the JPEG file that it was made of, or as one of its pixels.

The size is read from the head of the codestream (ISO/IEC 18181-1, 9.3) before anything is decoded.
"""

import io
from importlib import import_module

import numpy as np
from PIL import Image

from loopfeed.preprocess.decoding.box_formats import boxes
from loopfeed.preprocess.sources.array_images import encode_array

_CODESTREAM = b"\xff\x0a"
_SIGNATURE = b"\0\0\0\x0cJXL \r\n\x87\n"
_WHOLE, _PART = b"jxlc", b"jxlp"
_HEAD_BYTES = 16
# The numbers of bits of a side that is not a multiple of 8, and width : height by the code that stands in its place.
_SIDE_BITS = (9, 13, 18, 30)
_RATIOS = (None, (1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))


def is_jpeg_xl(head: bytes) -> bool:
    """Return whether a file that begins with the bytes `head` is a JPEG XL image, with boxes or without."""
    return head.startswith((_CODESTREAM, _SIGNATURE))


def claimed_size(encoded: bytes, max_pixels: int) -> tuple[int, int]:
    """Return the width and height that a file says that it has.

    Raises:
        ValueError: it says nothing, or more than `max_pixels` pixels.
    """
    head = _head_of(encoded)
    if len(head) < _HEAD_BYTES // 2 or not head.startswith(_CODESTREAM):
        raise ValueError("it is truncated, or has no picture; download it again")
    bits, used = int.from_bytes(head[2:], "little"), 0

    def take(count: int) -> int:
        nonlocal used
        used += count
        return bits >> used - count & (1 << count) - 1

    is_small = take(1)

    def side() -> int:
        return (take(5) + 1) * 8 if is_small else take(_SIDE_BITS[take(2)]) + 1

    height = side()
    ratio = _RATIOS[take(3)]
    width = side() if ratio is None else height * ratio[0] // ratio[1]
    if width * height > max_pixels:
        raise ValueError(f"{width}×{height} is more than the {max_pixels} pixels allowed in one image; make it smaller")
    return width, height


def transcode_jpeg_xl(encoded: bytes) -> bytes:
    """Return a file of another format with the same pixels, turned as the codestream says, and the profile left out.

    It is the JPEG file of which it was made if it was; else an uncompressed one. Of an animation it is the first frame.

    Raises:
        ValueError: it is damaged.
    """
    try:
        is_jpeg, info, pixels, *_ = import_module("pillow_jxl").Decoder(num_threads=0)(encoded)
    except RuntimeError as error:
        raise ValueError("it is damaged or truncated; download it again") from error
    if is_jpeg:
        return bytes(pixels)
    image = Image.frombytes(info.mode, (info.width, info.height), pixels)
    if image.mode == "F":
        file = io.BytesIO()
        image.save(file, "TIFF")
        return file.getvalue()
    return encode_array(np.asarray(image.convert("RGBA") if image.mode == "LA" else image))


def _head_of(encoded: bytes) -> bytes:
    """Return the first bytes of a file's codestream, which may be in a box, or in several."""
    if encoded.startswith(_CODESTREAM):
        return encoded[:_HEAD_BYTES]
    head = b""
    for place, num_bytes, kind in boxes(encoded):
        if kind in (_WHOLE, _PART) and len(head) < _HEAD_BYTES:
            start = place + (16 if encoded[place : place + 4] == b"\0\0\0\1" else 8) + 4 * (kind == _PART)
            head += encoded[start : min(start + _HEAD_BYTES, place + num_bytes)]
    return head[:_HEAD_BYTES]
