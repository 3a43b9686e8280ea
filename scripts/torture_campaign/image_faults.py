"""HostileImage images: damaged files of every format, and files that were made to cost time or memory."""

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

ImageMaker = Callable[[Path], None]
SUFFIXES = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "PPM": "ppm"}
_MODES = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
    "BMP": ("RGB", "L", "P", "1"),
    "TIFF": ("RGB", "RGBA", "L", "CMYK", "P"),
    "PPM": ("RGB", "L"),
}


def sound_image(draw: random.Random, kind: str) -> bytes:
    """Return a small sound file of a format, in one of its modes and ways of storing."""
    random_ = np.random.default_rng(draw.randrange(1 << 32))
    width, height = draw.randrange(33, 80), draw.randrange(33, 80)
    image = Image.fromarray(random_.integers(0, 256, (height, width, 3)).astype(np.uint8))
    image = image.convert(draw.choice(_MODES[kind]))
    by_kind: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": draw.choice([50, 95]), "progressive": draw.random() < 0.4, "exif": _exif(draw)},
        "PNG": {"compress_level": draw.choice([1, 9])},
        "WEBP": {"lossless": draw.random() < 0.5},
        "TIFF": {"compression": draw.choice(["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"])},
    }
    file = io.BytesIO()
    image.save(file, kind, **by_kind.get(kind, {}))
    return file.getvalue()


def _exif(draw: random.Random) -> bytes:
    exif = Image.Exif()
    exif[274] = draw.randrange(1, 9)
    return exif.tobytes()


def damage_image(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Return a damaged file and what was done to it."""
    data, size = bytearray(content), len(content)
    how = draw.choice(["bits", "bits", "head", "head", "cut", "zeros", "size field", "spliced", "extended", "lengths"])
    if how == "bits":
        for _ in range(draw.choice([1, 1, 3, 20])):
            data[draw.randrange(size)] ^= 1 << draw.randrange(8)
    elif how == "head":
        for _ in range(draw.choice([1, 2, 6])):
            data[draw.randrange(min(size, 64))] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
    elif how == "cut":
        del data[draw.randrange(size) :]
    elif how == "zeros":
        start = draw.randrange(size)
        data[start : start + 64] = bytes(len(data[start : start + 64]))
    elif how in ("size field", "lengths"):
        at = draw.randrange(min(size - 4, 40 if how == "size field" else size - 4))
        value = draw.choice([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 65535, 65500])
        data[at : at + 4] = struct.pack(draw.choice(["<I", ">I"]), value)
    elif how == "spliced":
        data[size // 2 :] = data[: draw.randrange(size)]
    else:
        data += draw.choice([bytes(1000), draw.randbytes(1000), content])
    return bytes(data), how


def draw_image_fault(draw: random.Random) -> tuple[str, bytes, str]:
    """Return a drawn hostile file: its suffix, its bytes, and what it is."""
    kind = draw.choice(list(SUFFIXES))
    content, how = damage_image(sound_image(draw, kind), draw)
    return SUFFIXES[kind], content, f"{kind}, {how}"


def png_chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def write_png(path: Path, width: int, height: int, *, bits: int, colour: int, row: bytes, before: bytes = b"") -> None:
    """Write a PNG file of equal rows, streamed through the compressor."""

    def parts() -> Iterator[bytes]:
        compressor = zlib.compressobj(1)
        for _ in range(height):
            yield compressor.compress(b"\0" + row)
        yield compressor.flush()

    with path.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.write(png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)) + before)
        for part in parts():
            if part:
                file.write(png_chunk(b"IDAT", part))
        file.write(png_chunk(b"IEND", b""))


def deep_png(colour: int, samples: int) -> ImageMaker:
    """Return the maker of a 16-bit PNG just below Pillow's limit of pixels, of so many samples a pixel."""

    def make(path: Path) -> None:
        row = random.Random(0).randbytes(2 * samples * 9400)
        write_png(path, 9400, 9400, bits=16, colour=colour, row=row)

    make.__doc__ = f"Write a 16-bit PNG of 9,400 × 9,400 pixels of {samples} samples."
    return make


def bomb_png(path: Path) -> None:
    """Write a PNG of 60,000 × 60,000 pixels of one bit."""
    write_png(path, 60_000, 60_000, bits=1, colour=0, row=bytes(7_500))


def giant_header_png(path: Path) -> None:
    """Write a PNG whose header says 2³¹ − 1 pixels a side."""
    header = struct.pack(">IIBBBBB", 0x7FFFFFFF, 0x7FFFFFFF, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(b"\0")))


def text_bomb_png(path: Path) -> None:
    """Write a small PNG with 200 compressed texts of 10 MB each."""
    text = png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(10_000_000), 9))
    write_png(path, 40, 40, bits=8, colour=2, row=bytes(120), before=text * 200)


def profile_bomb_png(path: Path) -> None:
    """Write a small PNG with a colour profile of 2 GB, compressed."""
    compressor = zlib.compressobj(9)
    block = bytes(1 << 20)
    profile = b"".join(compressor.compress(block) for _ in range(2000)) + compressor.flush()
    write_png(path, 40, 40, bits=8, colour=2, row=bytes(120), before=png_chunk(b"iCCP", b"p\0\0" + profile))


def many_chunks_png(path: Path) -> None:
    """Write a small PNG with 300,000 empty chunks."""
    write_png(path, 40, 40, bits=8, colour=2, row=bytes(120), before=png_chunk(b"tEXt", b"a\0b") * 300_000)


def many_scans_jpeg(path: Path) -> None:
    """Write a progressive JPEG of 3,000 × 3,000 pixels whose last scan comes 8,000 times."""
    file = io.BytesIO()
    Image.new("RGB", (3000, 3000), (90, 120, 30)).save(file, "JPEG", progressive=True, quality=60)
    content = file.getvalue()
    last = content.rindex(b"\xff\xda")
    # With the tables that precede it, the scan is decoded again each time.
    path.write_bytes(content[:-2] + content[last:-2] * 8000 + content[-2:])


def comments_jpeg(path: Path) -> None:
    """Write a JPEG with 60 MB of comments."""
    content = _saved("JPEG")
    comment = b"\xff\xfe\xff\xff" + b"#" * 65533
    path.write_bytes(content[:2] + comment * 900 + content[2:])


def giant_jpeg(path: Path) -> None:
    """Write a JPEG whose frame says 65,500 × 65,500 pixels."""
    content = bytearray(_saved("JPEG"))
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = struct.pack(">HH", 65500, 65500)
    path.write_bytes(content)


def exif_loop_jpeg(path: Path) -> None:
    """Write a JPEG whose EXIF directories lead in a circle."""
    ifd = struct.pack("<H", 1) + struct.pack("<HHII", 0x8769, 4, 1, 8) + struct.pack("<I", 8)
    exif = b"Exif\0\0II*\0\x08\0\0\0" + ifd
    content = _saved("JPEG")
    path.write_bytes(content[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + content[2:])


def endless_gif(path: Path) -> None:
    """Write a GIF whose comment has 40 MB of blocks and no end."""
    content = _saved("GIF")
    path.write_bytes(content[:13] + bytes(768) + b"\x21\xfe" + (b"\xff" + b"#" * 255) * 160_000)


def many_frames_gif(path: Path) -> None:
    """Write a GIF of 200,000 frames of one pixel."""
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    path.write_bytes(b"GIF89a" + struct.pack("<HHBBB", 40, 40, 0x80, 0, 0) + bytes(6) + frame * 200_000 + b";")


def giant_gif(path: Path) -> None:
    """Write a GIF of 65,535 × 65,535 pixels with no data."""
    path.write_bytes(b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0x80, 0, 0) + bytes(6) + b"\x2c"
                     + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x02\x02\x44\x01\x00;")  # fmt: skip


def tiff_loop(path: Path) -> None:
    """Write a TIFF whose directory is its own next one."""
    content = bytearray(_saved("TIFF"))
    start = int.from_bytes(content[4:8], "little")
    count = int.from_bytes(content[start : start + 2], "little")
    content[start + 2 + 12 * count : start + 6 + 12 * count] = struct.pack("<I", start)
    path.write_bytes(content)


def tiff_giant_tag(path: Path) -> None:
    """Write a TIFF with a tag that says it has 2³⁰ values."""
    content = bytearray(_saved("TIFF"))
    start = int.from_bytes(content[4:8], "little")
    content[start + 2 + 4 : start + 2 + 8] = struct.pack("<I", 1 << 30)
    path.write_bytes(content)


def tiff_bomb(path: Path) -> None:
    """Write a TIFF of 20,000 × 20,000 deflated zeros."""
    rows = zlib.compress(bytes(20_000 * 2_000), 9)
    strips = 10
    tags = [(256, 3, 1, 20_000), (257, 3, 1, 20_000), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1),
            (277, 3, 1, 1), (278, 3, 1, 2_000)]  # fmt: skip
    head = 8 + 2 + 12 * (len(tags) + 2) + 4
    offsets = struct.pack(f"<{strips}I", *[head + 8 * strips] * strips)
    lengths = struct.pack(f"<{strips}I", *[len(rows)] * strips)
    entries = sorted([*tags, (273, 4, strips, head), (279, 4, strips, head + 4 * strips)])
    ifd = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *each) for each in entries) + bytes(4)
    path.write_bytes(b"II*\0\x08\0\0\0" + ifd + offsets + lengths + rows)


def comments_ppm(path: Path) -> None:
    """Write a PPM with 150 MB of comments ahead of its size."""
    path.write_bytes(b"P6\n" + b"#" + b"c" * 150_000_000 + b"\n40 40 255\n" + bytes(4800))


def spaces_ppm(path: Path) -> None:
    """Write a PPM with 100 MB of spaces ahead of its size."""
    path.write_bytes(b"P6" + b" " * 100_000_000 + b"40 40 255\n" + bytes(4800))


def digits_ppm(path: Path) -> None:
    """Write a PPM whose width has 5,000 digits."""
    path.write_bytes(b"P6 " + b"9" * 5000 + b" 40 255\n" + bytes(4800))


def plain_ppm(path: Path) -> None:
    """Write a plain PPM with 150 MB of comments in its pixels."""
    path.write_bytes(b"P3 40 40 255\n" + b"1 2 3\n" * 800 + b"#" * 150_000_000 + b"\n" + b"1 2 3\n" * 800)


def plain_comments_ppm(path: Path) -> None:
    """Write a plain PPM with a million comments ahead of its pixels."""
    path.write_bytes(b"P3 40 40 255\n" + b"#\n" * 1_000_000 + b"1 2 3\n" * 1600)


def plain_numbers_ppm(path: Path) -> None:
    """Write a plain PPM of 5,000 × 5,000 pixels, 150 MB of digits."""
    path.write_bytes(b"P3 5000 5000 255\n" + b"9 " * 75_000_000)


def giant_bmp(path: Path) -> None:
    """Write a BMP of 2³¹ − 1 rows, compressed by run lengths."""
    content = bytearray(_saved("BMP"))
    content[18:26] = struct.pack("<ii", 0x7FFFFFF, -0x7FFFFFFF)
    path.write_bytes(content)


def giant_webp(path: Path) -> None:
    """Write an animated WebP with a canvas of 16,384 × 16,384 pixels."""
    body = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + b"\xff\x3f\0\xff\x3f\0"
    body += b"ANIM" + struct.pack("<I", 6) + bytes(6)
    path.write_bytes(b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body)


def narrow_png(path: Path) -> None:
    """Write a PNG of 1 × 5,000,000 pixels, which would be enlarged to 160 million."""
    write_png(path, 1, 5_000_000, bits=8, colour=0, row=b"\x40")


def empty(path: Path) -> None:
    """Write nothing."""
    path.write_bytes(b"")


def web_page(path: Path) -> None:
    """Write a web page."""
    path.write_bytes(b"<!DOCTYPE html><html>not found</html>")


def giant_hole(path: Path) -> None:
    """Write a file of 20 GB of nothing behind the head of a JPEG."""
    path.write_bytes(_saved("JPEG"))
    with path.open("r+b") as file:
        file.truncate(20_000_000_000)


def _saved(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (48, 40), (200, 30, 90)).save(file, kind)
    return file.getvalue()


MAKERS: dict[str, ImageMaker] = {
    "deep-grey.png": deep_png(0, 1),
    "deep-grey-alpha.png": deep_png(4, 2),
    "deep-colour.png": deep_png(2, 3),
    "deep-colour-alpha.png": deep_png(6, 4),
    "bomb.png": bomb_png,
    "giant-header.png": giant_header_png,
    "text-bomb.png": text_bomb_png,
    "profile-bomb.png": profile_bomb_png,
    "many-chunks.png": many_chunks_png,
    "narrow.png": narrow_png,
    "many-scans.jpg": many_scans_jpeg,
    "comments.jpg": comments_jpeg,
    "giant.jpg": giant_jpeg,
    "exif-loop.jpg": exif_loop_jpeg,
    "endless.gif": endless_gif,
    "many-frames.gif": many_frames_gif,
    "giant.gif": giant_gif,
    "loop.tif": tiff_loop,
    "giant-tag.tif": tiff_giant_tag,
    "bomb.tif": tiff_bomb,
    "comments.ppm": comments_ppm,
    "spaces.ppm": spaces_ppm,
    "digits.ppm": digits_ppm,
    "plain.ppm": plain_ppm,
    "giant.bmp": giant_bmp,
    "giant.webp": giant_webp,
    "empty.jpg": empty,
    "page.jpg": web_page,
    "hole.jpg": giant_hole,
    "plain-comments.ppm": plain_comments_ppm,
    "plain-numbers.ppm": plain_numbers_ppm,
}
DEEP = frozenset(name for name in MAKERS if name.startswith("deep-"))
HEAVY = DEEP | {
    "many-scans.jpg",
    "bomb.png",
    "profile-bomb.png",
    "comments.ppm",
    "spaces.ppm",
    "plain.ppm",
    "plain-numbers.ppm",
}
