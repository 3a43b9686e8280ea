"""Files whose insides are larger than the picture that they describe are refused before a decoder takes memory."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, features

from loopfeed.preprocess.decoding.decode import DecodeError, ResizeRule, decode_stored
from loopfeed.preprocess.decoding.hidden_size import hidden_pixels
from loopfeed.preprocess.decoding.orientation import parse_raw_profile, png_text

RULE = ResizeRule(8, 8)
needs_avif = pytest.mark.skipif(not features.check("avif"), reason="Pillow was built without libavif")


def tiled_tiff(side: int, *more: tuple[int, int], kind: int = 4) -> bytes:
    """Return a TIFF of one grey pixel in a tile of side × side, whose contents are missing."""
    picture = ((256, 1), (257, 1), (258, 8), (259, 1), (262, 1), (277, 1))
    entries = (*picture, (322, side), (323, side), *more, (324, 8), (325, 1))
    body = b"".join(struct.pack("<HHII", tag, kind if tag in (322, 323) else 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + body + bytes(4)


def jpeg_2000(side: int, tile: int, precincts: bytes = b"", between: bytes = b"") -> bytes:
    """Return the headers of a grey JPEG 2000 picture of side × side with tiles and, from the smallest on, precincts."""

    def segment(marker: int, content: bytes) -> bytes:
        return struct.pack(">HH", marker, len(content) + 2) + content

    size = struct.pack(">HIIIIIIIIH", 0, side, side, 0, 0, tile, tile, 0, 0, 1) + bytes([7, 1, 1])
    coding = bytes([bool(precincts), 0, 0, 1, 0, max(0, len(precincts) - 1), 4, 4, 0, 1]) + precincts
    return b"\xff\x4f" + segment(0xFF51, size) + between + segment(0xFF52, coding) + b"\xff\xd9"


def avif(mode: str, width: int, height: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, len(mode)), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "AVIF")
    return file.getvalue()


def png_of_text(text: bytes) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    head, tail = file.getvalue()[:33], file.getvalue()[33:]
    content = b"tEXtRaw profile type exif\0" + text
    return head + struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content)) + tail


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (tiled_tiff(20_000), "its tiles or frames have 400000000 pixels, more than the 89478485 allowed"),
        (tiled_tiff(20_000, (323, 1)), "its tiles or frames have 400000000 pixels"),
        (jpeg_2000(1000, 1000, b"\x00", b"\xff\x64\x00\x02" * 2**18), "its headers have more than 262144 markers"),
        (jpeg_2000(1000, 1000, b"\x00", b"\xff\x30\x00\x20"), "it has the marker FF30, which is not of its format"),
        (jpeg_2000(255, 1), "it has 65025 tiles, more than the 4096 allowed"),
        (jpeg_2000(255, 0), "its tiles have no size"),
        (jpeg_2000(1000, 1000, b"\x00"), "it has up to 1000000 precincts, more than the 131072 allowed"),
    ],
)
def test_a_small_file_that_asks_for_much_is_refused(encoded, message):
    with pytest.raises(DecodeError, match=message):
        decode_stored(encoded, RULE)


def test_the_size_of_a_tile_is_a_number_of_the_files_own_kind():
    with pytest.raises(ValueError, match="the size of its tiles is no number"):
        hidden_pixels(tiled_tiff(20_000, kind=16), "TIFF")


@needs_avif
@pytest.mark.parametrize(("mode", "planes"), [("RGB", 1), ("RGBA", 2)])
def test_the_pixels_of_avif_frames_are_read_from_their_sequence_headers(mode, planes):
    for width, height in ((40, 30), (333, 201), (1000, 700)):
        assert hidden_pixels(avif(mode, width, height), "AVIF") == planes * width * height


@needs_avif
def test_frames_that_are_not_simply_told_count_as_the_largest():
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "AVIF", save_all=True, append_images=[Image.new("RGB", (16, 16), "red")])
    assert hidden_pixels(file.getvalue(), "AVIF") is None
    assert hidden_pixels(avif("RGB", 16, 16)[:200], "AVIF") is None


def test_usual_files_are_not_refused():
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8))
    for options in ({}, {"tile_size": (64, 64)}, {"precinct_size": (128, 128), "codeblock_size": (32, 32)}):
        file = io.BytesIO()
        pixels.save(file, "JPEG2000", **options)
        assert decode_stored(file.getvalue(), RULE)[0].size == (8, 8)
    file = io.BytesIO()
    pixels.save(file, "TIFF")
    assert hidden_pixels(file.getvalue(), "TIFF") == 0
    assert hidden_pixels(tiled_tiff(256), "TIFF") == 65_536


def test_a_long_text_of_a_png_is_not_divided():
    profile = b"\nexif\n      26\n" + b"Exif\0\0II*\0".hex().encode()
    assert parse_raw_profile(profile) == b"Exif\0\0II*\0"
    assert parse_raw_profile(profile[:20] + b"\n" + profile[20:]) == b"Exif\0\0II*\0"
    assert png_text(b"tEXt", b"\n" * (1 << 20)) is not None
    assert png_text(b"tEXt", b"\n" * ((1 << 20) + 1)) is None
    assert decode_stored(png_of_text(b"\n" * (2 << 20)), RULE)[0].size == (8, 8)
