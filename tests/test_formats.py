"""Container parsing: what is kept of a JPEG or PNG file, and EXIF orientation."""

import io
import struct
import threading
import warnings
import zlib
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from loopfeed.preprocess.decoding.formats import open_pixels
from loopfeed.preprocess.decoding.known_formats import sniff
from loopfeed.preprocess.decoding.orientation import choose_orientation
from loopfeed.preprocess.decoding.stripping import strip_jpeg, strip_png


def encode(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8))


def segment(marker, payload):
    return bytes([0xFF, marker]) + struct.pack(">H", len(payload) + 2) + payload


def chunk(kind, payload):
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def exif_block(value, order="<", kind=3, tag=0x0112, count=1):
    header = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    other = struct.pack(order + "HHII", 0x0100, 4, 1, 640)
    packed = struct.pack(order + "HHI", tag, kind, count) + struct.pack(
        order + ("HH" if kind == 3 else "I"), value, *([0] if kind == 3 else [])
    )
    return b"Exif\0\0" + header + struct.pack(order + "H", 2) + other + packed + bytes(4)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", [3, 4])
@pytest.mark.parametrize("value", range(1, 9))
def test_orientation_is_found_in_either_byte_order(order, kind, value):
    assert choose_orientation(exif_block(value, order, kind), None) == value
    assert choose_orientation(exif_block(value, order, kind).removeprefix(b"Exif\0\0"), None) == value


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"Exif\0\0",
        b"Exif\0\0XX*\0" + bytes(20),
        exif_block(0),
        exif_block(9),
        exif_block(6, tag=0x0113),
        exif_block(6, count=2),
        exif_block(6)[:-8],
        b"Exif\0\0II*\0\xff\xff\xff\xff" + bytes(20),
    ],
)
def test_a_damaged_or_silent_block_means_upright(block):
    assert choose_orientation(block, None) == 1


@given(st.binary(max_size=60))
def test_every_block_results_in_an_orientation(junk):
    for prefix in (b"", b"II*\0\x08\0\0\0", b"Exif\0\0MM\0*\0\0\0\x08"):
        assert 1 <= choose_orientation(prefix + junk, None) <= 8


def test_jpeg_keeps_pixels_and_loses_metadata():
    plain = encode(NOISE, "JPEG", quality=90)
    metadata = (
        segment(0xE1, exif_block(6))
        + segment(0xE1, exif_block(3))
        + segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>")
        + segment(0xE2, b"ICC_PROFILE\0" + bytes(40))
        + segment(0xED, b"Photoshop 3.0\0" + bytes(7))
        + segment(0xFE, b"a comment")
    )
    stripped, orientation = strip_jpeg(plain[:2] + metadata + plain[2:])
    assert stripped == plain
    assert orientation == 6  # of the first block
    assert strip_jpeg(plain) == (plain, 1)


def test_jpeg_padding_and_junk_between_segments_is_stepped_over():
    plain = encode(NOISE, "JPEG")
    odd = plain[:20] + b"\xff\xff" + segment(0xE1, exif_block(8)) + b"junk\xff\x00\xff" + plain[20:]
    stripped, orientation = strip_jpeg(odd)
    assert orientation == 8
    assert b"Exif" not in stripped
    known = sniff(odd)
    assert known is not None
    image, *_ = open_pixels(odd, known, max_pixels=10**6)
    np.testing.assert_array_equal(np.asarray(image), np.asarray(Image.open(io.BytesIO(plain))))


@pytest.mark.parametrize(
    "filling", [b"\xff", b"\xff\x00", b"\xff\xd0", b"junk", segment(0xE1, b""), segment(0xDB, b"")], ids=repr
)
def test_endless_junk_or_segments_are_refused_at_once(filling):
    # Each of these took Pillow or a loop here many seconds in Python, with every other thread waiting.
    plain = encode(NOISE, "JPEG")
    known = sniff(plain)
    assert known is not None
    for rest in (plain[2:], b""):
        encoded = plain[:2] + filling * (2**24 // len(filling)) + rest
        with pytest.raises(ValueError, match=r"\d+ bytes of junk and \d+ segments come before the pixels"):
            open_pixels(encoded, known, max_pixels=10**6)


def test_the_scan_is_never_searched_for_markers():
    plain = encode(NOISE, "JPEG")
    trailer = segment(0xE1, exif_block(6)) + b"\xff\xd9"
    assert strip_jpeg(plain + trailer) == (plain + trailer, 1)


def test_png_keeps_what_makes_its_pixels():
    plain = encode(NOISE, "PNG")
    metadata = (
        chunk(b"acTL", bytes(8))
        + chunk(b"iCCP", b"bad\0\0not zlib")
        + chunk(b"zTXt", b"bomb\0\0" + zlib.compress(bytes(10**6)))
        + chunk(b"eXIf", exif_block(5).removeprefix(b"Exif\0\0"))
    )
    assert strip_png(plain[:33] + metadata + plain[33:]) == (plain, 5)


def test_endless_png_chunks_are_refused_at_once():
    plain = encode(NOISE, "PNG")
    for kind in (b"tEXt", b"IDAT"):
        with pytest.raises(ValueError, match="it has more than 65536 chunks"):
            strip_png(plain[:33] + chunk(kind, b"") * 70000 + plain[33:])


@pytest.mark.parametrize(("kind", "length"), [(b"IHDR", 2**31), (b"IDAT", 2**32 - 1), (b"IDAT", 5000)])
def test_a_png_chunk_beyond_the_end_is_named(kind, length):
    encoded = bytearray(encode(NOISE, "PNG"))
    place = encoded.index(kind)
    encoded[place - 4 : place] = struct.pack(">I", length)
    left = len(encoded) - place - 4
    with pytest.raises(
        ValueError,
        match=f"its chunk {kind.decode()} is truncated: its length is {length} bytes, but only {left} are left",
    ):
        strip_png(bytes(encoded))


@pytest.mark.parametrize(
    ("kind", "place", "num_bytes"), [("PNG", 16, 4), ("GIF", None, 2), ("BMP", 18, 4), ("JPEG", None, 2), ("PPM", 3, 2)]
)
def test_an_image_without_pixels_is_refused(kind, place, num_bytes):
    encoded = bytearray(encode(NOISE, kind))
    if kind == "GIF":
        place = encoded.index(b"\x2c\0\0\0\0") + 5
        encoded[6:8] = b"\0\0"
    elif kind == "JPEG":
        place = encoded.index(b"\xff\xc0") + 7
    encoded[place : place + num_bytes] = b" 0" if kind == "PPM" else bytes(num_bytes)
    known = sniff(bytes(encoded))
    assert known is not None
    with pytest.raises((ValueError, SyntaxError, OSError)):
        open_pixels(bytes(encoded), known, max_pixels=10**6)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"\xff\xd8\xff\xe0", "JPEG"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "WebP"),
        (b"GIF89a", "GIF"),
        (b"GIF87a", "GIF"),
        (b"BM\0\0", "BMP"),
        (b"II*\0", "TIFF"),
        (b"MM\0*", "TIFF"),
        (b"P6\n", "PPM"),
        (b"RIFF\0\0\0\0WAVEfmt ", None),
        (b"P7\n", None),
        (b"P5", None),
        (b"", None),
    ],
)
def test_the_first_bytes_determine_the_format(head, name):
    known = sniff(head)
    assert (known.name if known else None) == name


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["TIFF", "GIF"])
def test_an_image_that_waits_for_memory_does_not_delay_others(kind):
    encoded = encode(NOISE, kind)
    known = sniff(encoded)
    assert known is not None
    filters = list(warnings.filters)
    sizes = []

    def open_another(num_pixels):
        """Decode another image in the meantime."""
        assert warnings.filters == filters
        other = threading.Thread(target=lambda: sizes.append(open_pixels(encoded, known, max_pixels=10**4)[0].size))
        other.daemon = True
        other.start()
        other.join(20)
        sizes.append(num_pixels)

    image, *_ = open_pixels(encoded, known, max_pixels=10**4, admit=open_another)
    assert sizes == [NOISE.size, NOISE.width * NOISE.height]
    assert image.size == NOISE.size


@pytest.mark.parametrize("compression", ["tiff_adobe_deflate", "group4"])
def test_libtiff_writes_no_lines_of_its_own_about_a_damaged_file(compression, capfd):
    image = NOISE.convert("1") if compression == "group4" else NOISE
    content = bytearray(encode(image, "TIFF", compression=compression))
    # Pillow writes the rows between the header and the directory.
    content[16:40] = bytes(24)
    known = sniff(bytes(content))
    assert known
    with suppress(Exception):
        open_pixels(bytes(content), known, max_pixels=10**6)
    assert capfd.readouterr() == ("", "")
