"""Writes the pixels of an array as an image file, which the decoder then reads with all its checks.

Nothing is compressed: opaque pixels become a binary PGM or PPM file, those with alpha a PNG file of stored blocks.
"""

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SHAPES = "[H, W], [H, W, 1], [H, W, 3] or [H, W, 4]"
_GREY, _RGB, _RGBA = 1, 3, 4
_PNG_SIGNATURE, _PNG_RGBA = b"\x89PNG\r\n\x1a\n", 6


def encode_array(pixels: NDArray[Any]) -> bytes:
    """Return an image file with the pixels of an array.

    Args:
        pixels: uint8 or uint16 `[H, W]` or `[H, W, 1]` (grey), `[H, W, 3]` (RGB), `[H, W, 4]` (RGB and alpha, not
            multiplied into it). Those of uint16 are treated like a file of 16 bits, see `--levels`.

    Raises:
        ValueError: the array has another shape or type, or no pixels.
    """
    if pixels.dtype.kind != "u" or pixels.dtype.itemsize > 2:
        raise ValueError(f"pixels must be uint8 from 0 to 255, or uint16, got {pixels.dtype}; {_conversion(pixels)}")
    height, width, *rest = pixels.shape if pixels.ndim in (2, 3) else (0, 0)
    num_channels = rest[0] if rest else _GREY
    if pixels.ndim not in (2, 3) or num_channels not in (_GREY, _RGB, _RGBA):
        is_first = pixels.ndim == 3 and pixels.shape[0] in (_GREY, _RGB, _RGBA)
        remedy = "move its channels last with .transpose(1, 2, 0)" if is_first else "reshape it, or drop channels"
        raise ValueError(f"the shape of an image must be {_SHAPES}, got {list(pixels.shape)}; {remedy}")
    if not height or not width:
        raise ValueError(f"an image must have at least one pixel, got the shape {list(pixels.shape)}; remove it")
    values = np.ascontiguousarray(pixels, pixels.dtype.newbyteorder(">"))  # of both formats
    if num_channels == _RGBA:
        return _png(values.reshape(height, -1), width)
    most = np.iinfo(pixels.dtype).max
    return b"".join((b"P%d\n%d %d\n%d\n" % (5 if num_channels == _GREY else 6, width, height, most), values.data))


def _conversion(pixels: NDArray[Any]) -> str:
    """Return how to convert pixels of another type."""
    if pixels.dtype.kind == "f":
        return "convert floats from 0 to 1 with (255 * pixels).round().astype(numpy.uint8), and whole ones without 255"
    if pixels.dtype.kind == "b":
        return "convert them with 255 * pixels.astype(numpy.uint8)"
    return "convert them with .astype(numpy.uint8) if none is beyond that"


def _png(rows: NDArray[Any], width: int) -> bytes:
    """Return a PNG file of RGBA pixels, big-endian `[H, 4·W]`, in blocks that are stored as they are."""
    height = len(rows)
    lines = np.zeros((height, 1 + rows.shape[1] * rows.itemsize), np.uint8)  # each begins with its filter, 0 for none
    lines[:, 1:] = rows.view(np.uint8)
    header = struct.pack(">IIBBBBB", width, height, 8 * rows.itemsize, _PNG_RGBA, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.data, 0)), (b"IEND", b""))
    return _PNG_SIGNATURE + b"".join(
        b"".join((struct.pack(">I", len(data)), kind, data, struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))))
        for kind, data in chunks
    )
