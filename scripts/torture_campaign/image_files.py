"""Hostile images: damaged files of every format, and files that were made to cost time or memory."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from scripts.torture_campaign.damage import change_bytes

type ImageMaker = Callable[[Path], object]

_MODES = {
    "JPEG": ("jpg", ["RGB", "L", "CMYK"]),
    "PNG": ("png", ["RGB", "RGBA", "L", "LA", "P", "1"]),
    "WEBP": ("webp", ["RGB", "RGBA"]),
    "GIF": ("gif", ["P", "L"]),
    "BMP": ("bmp", ["RGB", "L", "P", "1"]),
    "TIFF": ("tif", ["RGB", "RGBA", "L", "CMYK", "P"]),
    "PPM": ("ppm", ["RGB", "L"]),
}


def _sound_image(draw: random.Random, kind: str) -> bytes:
    """Return a small sound file of a format, in one of its modes and ways of storing."""
    noise = np.random.default_rng(draw.randrange(1 << 32))
    width, height = draw.randrange(33, 80), draw.randrange(33, 80)
    image = Image.fromarray(noise.integers(0, 256, (height, width, 3)).astype(np.uint8))
    exif = Image.Exif()
    exif[274] = draw.randrange(1, 9)
    by_kind: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": draw.choice([50, 95]), "progressive": draw.random() < 0.4, "exif": exif.tobytes()},
        "PNG": {"compress_level": draw.choice([1, 9])},
        "WEBP": {"lossless": draw.random() < 0.5},
        "TIFF": {"compression": draw.choice(["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"])},
    }
    file = io.BytesIO()
    image.convert(draw.choice(_MODES[kind][1])).save(file, kind, **by_kind.get(kind, {}))
    return file.getvalue()


def draw_image_fault(draw: random.Random) -> tuple[str, bytes, str]:
    """Return a drawn hostile file: its suffix, its bytes, and what it is."""
    kind = draw.choice(list(_MODES))
    data = bytearray(_sound_image(draw, kind))
    how = change_bytes(data, draw)
    return _MODES[kind][0], bytes(data), f"{kind}, {how}"


def png_chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def write_png(
    path: Path, width: int, height: int, *, bits: int = 8, colour: int = 2, row: bytes = bytes(120), before: bytes = b""
) -> None:
    """Write a PNG file of equal rows, streamed through the compressor; `before` stands ahead of them."""

    def parts() -> Iterator[bytes]:
        compressor = zlib.compressobj(1)
        for _ in range(height):
            yield compressor.compress(b"\0" + row)
        yield compressor.flush()

    with path.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.write(png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)) + before)
        file.writelines(png_chunk(b"IDAT", part) for part in parts() if part)
        file.write(png_chunk(b"IEND", b""))


def _deep_png(colour: int, samples: int) -> ImageMaker:
    """Return the maker of a 16-bit PNG just below Pillow's limit of pixels, of so many samples a pixel."""
    return lambda path: write_png(
        path, 9400, 9400, bits=16, colour=colour, row=random.Random(0).randbytes(2 * samples * 9400)
    )


def _png_with(make: Callable[[], bytes]) -> ImageMaker:
    """Return the maker of a small PNG with these chunks."""
    return lambda path: write_png(path, 40, 40, before=make())


def _bytes(make: Callable[[], bytes]) -> ImageMaker:
    return lambda path: path.write_bytes(make())


def _giant_header_png() -> bytes:
    """Return a PNG whose header says 2³¹ − 1 pixels a side."""
    header = struct.pack(">IIBBBBB", 0x7FFFFFFF, 0x7FFFFFFF, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(b"\0"))


def _profile_bomb() -> bytes:
    """Return a colour profile of 2 GB, compressed."""
    compressor, block = zlib.compressobj(9), bytes(1 << 20)
    profile = b"".join(compressor.compress(block) for _ in range(2000)) + compressor.flush()
    return png_chunk(b"iCCP", b"p\0\0" + profile)


def _many_scans_jpeg() -> bytes:
    """Return a progressive JPEG of 3,000 × 3,000 pixels whose last scan comes 8,000 times."""
    file = io.BytesIO()
    Image.new("RGB", (3000, 3000), (90, 120, 30)).save(file, "JPEG", progressive=True, quality=60)
    content = file.getvalue()
    last = content.rindex(b"\xff\xda")
    # With the tables that precede it, the scan is decoded again each time.
    return content[:-2] + content[last:-2] * 8000 + content[-2:]


def _jpeg_with(segment: bytes, count: int = 1) -> bytes:
    """Return a JPEG with more segments of its beginning."""
    content = _saved("JPEG")
    head = segment[:2] + struct.pack(">H", len(segment)) + segment[2:]
    return content[:2] + head * count + content[2:]


def _exif_loop() -> bytes:
    """Return a JPEG whose EXIF directories lead in a circle."""
    ifd = struct.pack("<H", 1) + struct.pack("<HHII", 0x8769, 4, 1, 8) + struct.pack("<I", 8)
    return _jpeg_with(b"\xff\xe1Exif\0\0II*\0\x08\0\0\0" + ifd)


def _gif_of(frames: bytes, side: int) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", side, side, 0x80, 0, 0) + bytes(6) + frames + b";"


def _frame(side: int, data: bytes) -> bytes:
    return b"\x2c" + struct.pack("<HHHHB", 0, 0, side, side, 0) + data


def _tiff_with(patch: Callable[[bytearray, int, int], None]) -> bytes:
    """Return a TIFF changed by a function of its bytes, the place of its directory and the number of its entries."""
    content = bytearray(_saved("TIFF"))
    start = int.from_bytes(content[4:8], "little")
    patch(content, start, int.from_bytes(content[start : start + 2], "little"))
    return bytes(content)


def _loop_tiff(content: bytearray, start: int, count: int) -> None:
    """Make a directory its own next one."""
    content[start + 2 + 12 * count : start + 6 + 12 * count] = struct.pack("<I", start)


def _giant_tag(content: bytearray, start: int, _count: int) -> None:
    """Have a tag say that it has 2³⁰ values."""
    content[start + 6 : start + 10] = struct.pack("<I", 1 << 30)


def _tiff_bomb() -> bytes:
    """Return a TIFF of 20,000 × 20,000 deflated zeros."""
    rows, strips = zlib.compress(bytes(20_000 * 2_000), 9), 10
    tags = [(256, 3, 1, 20_000), (257, 3, 1, 20_000), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1),
            (277, 3, 1, 1), (278, 3, 1, 2_000)]  # fmt: skip
    head = 8 + 2 + 12 * (len(tags) + 2) + 4
    offsets = struct.pack(f"<{strips}I", *[head + 8 * strips] * strips)
    lengths = struct.pack(f"<{strips}I", *[len(rows)] * strips)
    entries = sorted([*tags, (273, 4, strips, head), (279, 4, strips, head + 4 * strips)])
    ifd = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries) + bytes(4)
    return b"II*\0\x08\0\0\0" + ifd + offsets + lengths + rows


def _giant_webp() -> bytes:
    """Return an animated WebP with a canvas of 16,384 × 16,384 pixels."""
    body = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + b"\xff\x3f\0\xff\x3f\0"
    body += b"ANIM" + struct.pack("<I", 6) + bytes(6)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def _patched(kind: str, mark: bytes, after: int, value: bytes) -> bytes:
    """Return a file with other bytes behind a mark."""
    content = bytearray(_saved(kind))
    at = content.index(mark) + after
    content[at : at + len(value)] = value
    return bytes(content)


def _hollow_jpeg(path: Path) -> None:
    """Write a file of 20 GB of nothing behind the head of a JPEG."""
    path.write_bytes(_saved("JPEG"))
    with path.open("r+b") as file:
        file.truncate(20_000_000_000)


def _saved(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (48, 40), (200, 30, 90)).save(file, kind)
    return file.getvalue()


_TEXT = b"Comment\0\0"
_NUMBERS = b"1 2 3\n"
MAKERS: dict[str, ImageMaker] = {
    "deep-grey.png": _deep_png(0, 1),
    "deep-grey-alpha.png": _deep_png(4, 2),
    "deep-colour.png": _deep_png(2, 3),
    "deep-colour-alpha.png": _deep_png(6, 4),
    "bomb.png": lambda path: write_png(path, 60_000, 60_000, bits=1, colour=0, row=bytes(7_500)),
    "giant-header.png": _bytes(_giant_header_png),
    "text-bomb.png": _png_with(lambda: png_chunk(b"zTXt", _TEXT + zlib.compress(bytes(10_000_000), 9)) * 200),
    "profile-bomb.png": _png_with(_profile_bomb),
    "many-chunks.png": _png_with(lambda: png_chunk(b"tEXt", b"a\0b") * 300_000),
    # It would be enlarged to 160 million pixels.
    "narrow.png": lambda path: write_png(path, 1, 5_000_000, colour=0, row=b"\x40"),
    "many-scans.jpg": _bytes(_many_scans_jpeg),
    "comments.jpg": _bytes(lambda: _jpeg_with(b"\xff\xfe" + b"#" * 65533, 900)),
    "giant.jpg": _bytes(lambda: _patched("JPEG", b"\xff\xc0", 5, struct.pack(">HH", 65500, 65500))),
    "exif-loop.jpg": _bytes(_exif_loop),
    # A comment of 40 MB without an end.
    "endless.gif": _bytes(lambda: _saved("GIF")[:13] + bytes(768) + b"\x21\xfe" + (b"\xff" + b"#" * 255) * 160_000),
    "many-frames.gif": _bytes(lambda: _gif_of(_frame(1, b"\x02\x02\x44\x01\x00") * 200_000, 40)),
    "giant.gif": _bytes(lambda: _gif_of(_frame(65535, b"\x02\x02\x44\x01\x00"), 65535)),
    "loop.tif": _bytes(lambda: _tiff_with(_loop_tiff)),
    "giant-tag.tif": _bytes(lambda: _tiff_with(_giant_tag)),
    "bomb.tif": _bytes(_tiff_bomb),
    "comments.ppm": _bytes(lambda: b"P6\n" + b"#" + b"c" * 150_000_000 + b"\n40 40 255\n" + bytes(4800)),
    "spaces.ppm": _bytes(lambda: b"P6" + b" " * 100_000_000 + b"40 40 255\n" + bytes(4800)),
    "digits.ppm": _bytes(lambda: b"P6 " + b"9" * 5000 + b" 40 255\n" + bytes(4800)),
    "plain.ppm": _bytes(lambda: b"P3 40 40 255\n" + _NUMBERS * 800 + b"#" * 150_000_000 + b"\n" + _NUMBERS * 800),
    # 2³¹ − 1 rows, compressed by run lengths.
    "giant.bmp": _bytes(lambda: _patched("BMP", b"BM", 18, struct.pack("<ii", 0x7FFFFFF, -0x7FFFFFFF))),
    "giant.webp": _bytes(_giant_webp),
    "empty.jpg": _bytes(lambda: b""),
    "page.jpg": _bytes(lambda: b"<!DOCTYPE html><html>not found</html>"),
    "hole.jpg": _hollow_jpeg,
    "plain-comments.ppm": _bytes(lambda: b"P3 40 40 255\n" + b"#\n" * 1_000_000 + _NUMBERS * 1600),
    "plain-numbers.ppm": _bytes(lambda: b"P3 5000 5000 255\n" + b"9 " * 75_000_000),
}
HEAVY = (
    "deep-", "many-scans.jpg", "bomb.png", "profile-bomb.png", "comments.ppm", "spaces.ppm", "plain.ppm",
    "plain-numbers.ppm",
)  # fmt: skip
