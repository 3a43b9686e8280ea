"""Images stand upright wherever Pillow's own `exif_transpose` finds their orientation."""

import io
import struct
import zlib
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from loopfeed.preprocess.decoding import stripping
from loopfeed.preprocess.decoding.formats import open_pixels
from loopfeed.preprocess.decoding.known_formats import sniff
from loopfeed.preprocess.decoding.notes import NOTHING, DecodeNotes
from loopfeed.preprocess.decoding.orientation import png_text, turn_upright
from loopfeed.preprocess.decoding.stripping import strip_png

IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 10, 3), np.uint8))


def exif(orientation):
    block = Image.Exif()
    block[0x0112 if orientation is not None else 0x010F] = orientation or "maker"
    return block.tobytes()


def xmp(orientation, form="attribute"):
    if form == "attribute":
        return f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'
    return f"<x:xmpmeta><tiff:Orientation>{orientation}</tiff:Orientation></x:xmpmeta>"


def encoded(kind, **options):
    file = io.BytesIO()
    IMAGE.save(file, kind, **options)
    return file.getvalue()


def check_as_pillow(content, *, is_new=None):
    notes, known = list[DecodeNotes](), sniff(content)
    assert known is not None
    opened = open_pixels(content, known, max_pixels=100, note=notes.append)
    found = turn_upright(opened.image, opened.orientation).convert("RGB")
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        expected = ImageOps.exif_transpose(image).convert("RGB")
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    if is_new is not None:
        assert bool(sum(notes, NOTHING).num_changed) == is_new
    return found


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("block", ["none", "silent", 1, 6, 9])
def test_xmp_counts_where_exif_says_nothing(orientation, block):
    options = {} if block == "none" else {"exif": exif(None if block == "silent" else block)}
    for form in ("attribute", "element"):
        packet = xmp(orientation, form).encode()
        counts = block in ("none", "silent") and 2 <= orientation <= 8
        check_as_pillow(encoded("JPEG", xmp=packet, **options), is_new=counts)
        check_as_pillow(encoded("WEBP", lossless=True, xmp=packet, **options), is_new=counts)
        for add, compress in (("add_itxt", False), ("add_itxt", True), ("add_text", False), ("add_text", True)):
            texts = PngImagePlugin.PngInfo()
            getattr(texts, add)("XML:com.adobe.xmp", xmp(orientation, form), zip=compress)
            check_as_pillow(encoded("PNG", pnginfo=texts, **options), is_new=counts)
    check_as_pillow(encoded("TIFF", tiffinfo={700: xmp(orientation).encode()}))


@pytest.mark.parametrize("orientation", [1, 3, 6, None])
@pytest.mark.parametrize("options", [{}, {"exif": exif(8)}, {"exif": exif(None)}], ids=["alone", "eXIf", "silent eXIf"])
@pytest.mark.parametrize("compress", [False, True])
def test_the_raw_profile_of_a_png_counts_without_a_chunk_of_its_own(orientation, options, compress):
    block, texts = exif(orientation), PngImagePlugin.PngInfo()
    texts.add_text("Raw profile type exif", f"\nexif\n{len(block):8}\n{block.hex()}\n", zip=compress)
    texts.add_itxt("XML:com.adobe.xmp", xmp(4))
    check_as_pillow(encoded("PNG", pnginfo=texts, **options))


@pytest.mark.parametrize("kind", [b"tEXt", b"zTXt"])
def test_of_thousands_of_texts_only_the_last_is_unpacked(kind, monkeypatch):
    unpack = Mock(side_effect=png_text)
    monkeypatch.setattr(stripping, "png_text", unpack)
    plain = encoded("PNG")
    texts = [xmp(6 if number == 999 else 3).encode() for number in range(1000)]
    chunks = [text_chunk(kind, each if kind == b"tEXt" else b"\0" + zlib.compress(each)) for each in texts]
    assert check_as_pillow(plain[:33] + b"".join(chunks) + plain[33:]).size == (6, 10)
    assert unpack.call_count == 1


def text_chunk(kind, content):
    payload = b"XML:com.adobe.xmp\0" + content
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (b"tEXt", b"Comment\0tiff:Orientation=\"6"),
        (b"tEXt", b"XML:com.adobe.xmp"),
        (b"tEXt", b"XML:com.adobe.xmp\0"),
        (b"zTXt", b"XML:com.adobe.xmp\0\0damaged"),
        (b"zTXt", b"XML:com.adobe.xmp\0\0" + zlib.compress(bytes(2**20) + xmp(6).encode())),
        (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0"),
        (b"iTXt", b"XML:com.adobe.xmp\0"),
        (b"tEXt", b"Raw profile type exif\0\nexif\n  3\nxyz\n"),
        (b"tEXt", b"Raw profile type exif\0"),
    ],
)  # fmt: skip
def test_a_text_without_an_orientation_is_ignored(kind, payload):
    plain = encoded("PNG")
    chunk = struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))
    assert strip_png(plain[:33] + chunk + plain[33:]) == (plain, 1)
