"""Decodes what is there of a file that ends too early, and counts its rows.

A decoder does not say how far it came, so the picture is decoded twice, with another continuation after the end of the
file each time: what both have in common does not depend on what is missing. A file whose whole picture is there, and
that lacks only its end marker or a checksum, is therefore recognised.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from loopfeed.preprocess.decoding.box_formats import AVIF, HEIC, JPEG_2000

type Load = Callable[[bytes, Callable[[ImageFile.ImageFile], None]], Image.Image]
"""Opens a file, calls the function with the opened image, and decodes it."""

_JPEG_END = b"\xff\xd9"
# Entropy-coded data without a marker. They begin differently, because the first bits alone may be those of an empty
# block, and the last blocks of a picture often are.
_JPEG_NOISE = tuple(
    bytes([first]) + np.random.default_rng(first).integers(0, 255, 1024, dtype=np.uint8).tobytes()
    for first in (0x00, 0x55, 0xAA, 0xFE)
)
_JPEG_SCAN, _JPEG_COEFFICIENTS = 0xDA, 64
# Matched in C, because damaged files may have millions of fill bytes.
_JPEG_SEGMENT = re.compile(rb"\xff[^\x00\x01\xd0-\xd9\xff]")
_GIF_END = b";"
# In the messages of Pillow's plugins about a file, or a header of it, that ends too early.
_ENDS_EARLY = ("truncated", "not enough image data", "unpack", "reached eof")
_JPEG_RESTART = re.compile(rb"\xff[\xd0-\xd7]")
_JPEG_RESTART_INTERVAL = b"\xff\xdd"
_WEBP_TAILS = (0, 4, 16, 64, 256)
# The file itself says how much is missing, and the memory for that is not in any budget.
_MAX_WEBP_MISSING_SHARE, _MAX_WEBP_MISSING_BYTES = 16, 64 * 2**20
_VP8_HEADER_BYTES = 10
# Rows are compared in pieces, and images that take long with one continuation only: this bounds memory and time.
_COMPARED_PIXELS, _MANY_PIXELS, _MANY_SCANS = 2**20, 2**24, 16
_TIFF_ENTRY_BYTES = {False: 12, True: 20}
_FILLS = (0, 255)
_DEEP_FILLS = (0, 65535)


@dataclass(frozen=True)
class Salvaged:
    """What is there of a truncated picture.

    Attributes:
        image: the picture; what is missing is 0 or, in a JPEG, grey.
        num_rows: the number of rows that are there.
        has_all_detail: false for a picture whose later scans are missing, which refine all rows.
    """

    image: Image.Image
    num_rows: int
    has_all_detail: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the picture is missing."""
        return self.has_all_detail and self.num_rows == self.image.height

    def describe(self) -> str:
        """Return how much is there, such as "30 of 300 rows (10 %) are there"."""
        rows, height = self.num_rows, self.image.height
        if not self.has_all_detail and rows == height:
            return f"all {height} rows (100 %) are there, but not all of their detail"
        return f"{rows} of {height} rows ({100 * rows // height} %) are there"


def is_cut(error: Exception, encoded: bytes, name: str) -> bool:
    """Return whether Pillow's error about a file of the format ``name`` means that the file ends too early."""
    if name == "WebP":
        return len(encoded) < _riff_bytes(encoded)
    if name in (AVIF, HEIC, JPEG_2000):
        return False  # nothing of them can be kept, and `box_formats` says that they are truncated
    text = str(error).lower()
    if isinstance(error, (struct.error, IndexError)) or any(each in text for each in _ENDS_EARLY):
        return True
    if name == "TIFF":
        return "decoder error" in text or "unknown data organization" in text or _lacks_directory(encoded)
    return name == "GIF" and "no more images" in text and not encoded.endswith(_GIF_END)


def _lacks_directory(encoded: bytes) -> bool:
    """Return whether a TIFF file ends before the directory of its first image, which may be at its end."""
    order = "<" if encoded[:2] == b"II" else ">"
    is_big = 43 in encoded[2:4]
    try:
        (directory,) = struct.unpack_from(order + ("Q" if is_big else "I"), encoded, 8 if is_big else 4)
        (num_entries,) = struct.unpack_from(order + ("Q" if is_big else "H"), encoded, directory)
    except struct.error:
        return True
    return bool(directory + _TIFF_ENTRY_BYTES[is_big] * num_entries > len(encoded))


def salvage(encoded: bytes, name: str, load: Load) -> Salvaged | None:
    """Return what is there of a truncated file, None if nothing can be decoded.

    Args:
        encoded: the file, for PNG and JPEG without its metadata.
        name: the name of its format.
        load: decodes such a file; its exceptions are those of Pillow.
    """
    try:
        if name == "JPEG":
            return _salvage_jpeg(encoded, load)
        if name == "WebP":
            return _salvage_webp(encoded, load)
        return _salvage_filled(encoded, load)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - Pillow's plugins raise all kinds of exceptions for damaged fields
        return None


def _salvage_jpeg(encoded: bytes, load: Load) -> Salvaged:
    body = encoded.rstrip(b"\xff")
    ended = load(body + _JPEG_END, _nothing)
    num_scans, has_all_detail = _jpeg_scans(body)
    if num_scans > 1 and not has_all_detail:
        return Salvaged(ended, ended.height, has_all_detail)  # the first of several scans has all rows
    starts, is_large = [b""], ended.width * ended.height * max(1, num_scans // _MANY_SCANS) > _MANY_PIXELS
    if _JPEG_RESTART_INTERVAL in body:
        # At the end of an interval, the decoder skips everything up to the next marker.
        starts.append(b"\xff" + bytes([0xD0 + _next_restart(body)]))
    num_rows = min(
        _num_equal_rows(ended, load(body + start + noise + _JPEG_END, _nothing))
        for start in starts
        for noise in _JPEG_NOISE[-1 if is_large else 0 :]
    )
    if num_scans > 1 and num_rows < ended.height:
        num_rows, has_all_detail = ended.height, False
    return Salvaged(ended, num_rows, has_all_detail)


def _next_restart(body: bytes) -> int:
    """Return the number of the restart marker, 0 to 7, that follows the last one."""
    found = _JPEG_RESTART.findall(body, body.rfind(bytes([0xFF, _JPEG_SCAN])))
    return (found[-1][1] - 0xD0 + 1) % 8 if found else 0


def _jpeg_scans(encoded: bytes) -> tuple[int, bool]:
    """Return how many scans a JPEG file has begun, and whether they code all coefficients to their last bit."""
    precision: dict[tuple[int, int], int] = {}
    components: set[int] = set()
    position, num_scans = 2, 0
    is_progressive = False
    while (found := _JPEG_SEGMENT.search(encoded, position)) is not None and found.end() + 2 <= len(encoded):
        marker, start = encoded[found.end() - 1], found.end() + 2
        payload = encoded[start : found.end() + int.from_bytes(encoded[found.end() : start])]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            is_progressive = marker in (0xC2, 0xC6, 0xCA, 0xCE)
            components = {payload[6 + 3 * at] for at in range(payload[5])}
        elif marker == _JPEG_SCAN:
            num_scans += 1
            count = payload[0]
            first, last, bits = payload[1 + 2 * count : 4 + 2 * count]
            last = last if is_progressive else _JPEG_COEFFICIENTS - 1
            for at in range(count):
                for coefficient in range(first, last + 1):
                    precision[payload[1 + 2 * at], coefficient] = bits & 15
        position = start + len(payload)
    wanted = {(each, coefficient) for each in components for coefficient in range(_JPEG_COEFFICIENTS)}
    return num_scans, all(precision.get(each) == 0 for each in wanted)


def _salvage_webp(encoded: bytes, load: Load) -> Salvaged | None:
    """Decode the file continued with zeros, and with some of its last bytes replaced by zeros, too."""
    missing = _riff_bytes(encoded) - len(encoded)
    place = _webp_picture(encoded)
    if place is None or missing > min(_MAX_WEBP_MISSING_SHARE * len(encoded), _MAX_WEBP_MISSING_BYTES):
        return None
    kind, start, stop = place
    if stop <= len(encoded):
        whole = load(encoded + bytes(missing), _nothing)
        return Salvaged(whole, whole.height)  # only metadata are missing
    # The rows that do not need the last bytes, which are replaced by zeros, are there. Some continuations are refused.
    tried = (_try(load, encoded[: len(encoded) - tail] + bytes(missing + tail)) for tail in _WEBP_TAILS)
    decoded = list(islice((image for image in tried if image is not None), 2))
    if len(decoded) < 2:
        return None
    # Bytes of the picture are missing: if all rows can be decoded, the file is damaged elsewhere, too.
    found, num_rows = decoded[0], min(_num_equal_rows(*decoded), decoded[0].height - 1)
    if kind == b"VP8 ":
        # The first partition has the modes of all blocks. Blocks that are missing are often predicted alike, and the
        # filter at their edges changes rows above them.
        (tag,) = struct.unpack("<I", encoded[start : start + 3].ljust(4, b"\0"))
        has_modes = start + _VP8_HEADER_BYTES + (tag >> 5) <= len(encoded)
        num_rows = max(0, num_rows // 16 * 16 - 8) if has_modes else 0
    found.paste(0, (0, num_rows, found.width, found.height))  # what libwebp made of the zeros
    return Salvaged(found, num_rows)


def _webp_picture(encoded: bytes) -> tuple[bytes, int, int] | None:
    """Return the kind of the chunk with the picture, and where its content starts and stops; None if there is none."""
    position = 12
    while position + 8 <= len(encoded):
        kind, num_bytes = struct.unpack_from("<4sI", encoded, position)
        if kind in (b"VP8 ", b"VP8L"):
            return kind, position + 8, position + 8 + num_bytes
        position += 8 + num_bytes + num_bytes % 2
    return None


def _try(load: Load, content: bytes) -> Image.Image | None:
    try:
        return load(content, _nothing)
    except (OSError, ValueError, SyntaxError, EOFError):
        return None


def _riff_bytes(encoded: bytes) -> int:
    try:
        return 8 + int(struct.unpack_from("<I", encoded, 4)[0])
    except struct.error:
        return len(encoded)


def _salvage_filled(encoded: bytes, load: Load) -> Salvaged:
    """Decode onto black and onto white: the rows that are there are equal."""
    black, white = (load_part(load, encoded, fill=fill) for fill in (0, 1))
    return Salvaged(black, int(_equal_rows(black, white).sum()))


def load_part(
    load: Load, encoded: bytes, prepare: Callable[[ImageFile.ImageFile], None] = lambda _: None, *, fill: int = 0
) -> Image.Image:
    """Decode as much as possible of a file into an image that is filled beforehand, with 0 or else the largest value.

    Raises:
        Exception: as ``load``, but not because the file ends too early for its pixels.
    """
    opened: list[Any] = []

    def prepare_filled(image: ImageFile.ImageFile) -> None:
        prepare(image)
        opened.append(image)
        make = image.load_prepare

        def make_filled() -> None:
            make()
            value = (_DEEP_FILLS if image.mode[0] in "IF" else _FILLS)[fill]
            bands = len(image.getbands())
            image.im.paste(value if bands == 1 else (value,) * bands, (0, 0, *image.im.size))

        image.load_prepare = make_filled  # type: ignore[method-assign]

    try:
        return load(encoded, prepare_filled)
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, struct.error):
        if not opened:
            raise
        image: Image.Image = opened[-1]
        image.tile = []  # type: ignore[attr-defined] # what was decoded is all that there is
        image.load()
        return image


def _num_equal_rows(one: Image.Image, other: Image.Image) -> int:
    """Return the number of rows before the first that differs."""
    are_equal = _equal_rows(one, other)
    return len(are_equal) if are_equal.all() else int(are_equal.argmin())


def _equal_rows(one: Image.Image, other: Image.Image) -> NDArray[np.bool_]:
    """Return which rows of two images of the same mode and size are equal, bool ``[H]``."""
    step = max(1, _COMPARED_PIXELS // one.width)
    parts = []
    for top in range(0, one.height, step):
        box = (0, top, one.width, min(top + step, one.height))
        are_equal = np.asarray(one.crop(box)) == np.asarray(other.crop(box))
        parts.append(are_equal.reshape(box[3] - top, -1).all(axis=1))
    return np.concatenate(parts)


def _nothing(_: ImageFile.ImageFile) -> None:
    pass
