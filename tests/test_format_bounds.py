"""Files that would keep a decoder for minutes are refused; ordinary ones decode to the same bits."""

import io
import struct

import numpy as np
import pytest
from PIL import Image
from PIL.PpmImagePlugin import PpmImageFile

from loopfeed.preprocess.decoding.decode import DecodeError, ResizeRule, decode_image
from loopfeed.preprocess.decoding.format_bounds import bounded, check_jpeg_scans

RULE = ResizeRule(size=8, resize=8, resample="nearest")
NOISE = np.random.default_rng(3).integers(0, 256, (40, 50, 3), dtype=np.uint8)
GIF_HEAD = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0, 0, 0)


def encoded(kind, **options):
    file = io.BytesIO()
    Image.fromarray(NOISE).save(file, kind, **options)
    return file.getvalue()


def rle_bmp(width, height, data, compression=1):
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, compression, len(data), 0, 0, 256, 0) + bytes(1024)
    return b"BM" + struct.pack("<IHHI", 14 + len(header) + len(data), 0, 0, 14 + len(header)) + header + data


def tiff(*entries, num_entries=None):
    """Return a TIFF of one directory with arbitrary tags (tag, type, count, value)."""
    count = struct.pack("<H", len(entries) if num_entries is None else num_entries)
    return (
        b"II*\0" + struct.pack("<I", 8) + count + b"".join(struct.pack("<HHII", *each) for each in entries) + bytes(4)
    )


def webp(chunk):
    return b"RIFF" + struct.pack("<I", 100) + b"WEBP" + chunk.ljust(80, b"\0")


def many_scans(num_scans, trailer=b""):
    content = encoded("JPEG", progressive=True)
    start = content.rindex(b"\xff\xda")
    header = content[start : start + 2 + int.from_bytes(content[start + 2 : start + 4])]
    return content[:-2] + header * num_scans + content[-2:] + trailer


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"P6\n#" + b"x" * 2**16 + b"\n2 2\n255\n" + bytes(12), "its header does not end within 65536 bytes"),
        (b"P6\n" + b"#\n" * 2**15 + b"2 2\n255\n" + bytes(12), "its header does not end within 65536 bytes"),
        (b"P6" + b" " * 2**16 + b"2 2\n255\n" + bytes(12), "its header does not end within 65536 bytes"),
        (b"P3\n2 2\n255\n" + b"#\n" * 1001, "in plain ASCII form it may have at most 16777216 bytes and 1000 comments"),
        (b"P2\n2 2\n255\n" + b" " * 2**24, "in plain ASCII form it may have at most"),
        (GIF_HEAD + b"!\xff\x01x\x00" * 30_000, "more than 65536 blocks come before its first image"),
        (GIF_HEAD + b"!\xfe" + b"\x01x" * 70_000, "more than 65536 blocks come before its first image"),
        (GIF_HEAD + b"x" * 70_000, "more than 65536 blocks come before its first image"),
        (
            rle_bmp(5000, 5000, b"\0\2\0\0"),
            "with run-length encoding it may have at most 16777216 bytes and 16777216 pixels, but it has",
        ),
        (rle_bmp(8, 8, bytes(2**24), 2), "with run-length encoding it may have at most"),
        (rle_bmp(89_000_000, 1, b"\1\1\0\0"), "and 89000000 pixels; save it without"),
        (webp(b"VP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff" * 6), "16777216×16777216 is more than"),
        (webp(b"VP8L" + struct.pack("<I", 10) + b"\x2f\xff\xff\xff\xff"), "16384×16384 is more than"),
        (webp(b"VP8 " + struct.pack("<I", 10) + bytes(6) + b"\xff\x3f\xff\x3f"), "16383×16383 is more than"),
        (tiff((256, 7, 2**31, 8)), "its tags refer to at least 2147483648 bytes, but the file has only 26"),
        (tiff(*[(tag, 7, 3000, 8) for tag in range(1000)]), "its tags refer to at least .* bytes"),
        (tiff((273, 4, 2**20 + 1, 8)), "its tag 273 has 1048577 values, more than the 1048576 allowed"),
        (tiff(num_entries=5000), "it has 5000 tags, more than the 4096 allowed"),
        (b"II+\0" + struct.pack("<HHQQ", 8, 0, 16, 2**60), "it has 1152921504606846976 tags"),
        (many_scans(1_100), "it has more than 1000 scans for 2000 pixels; save it as a baseline"),
    ],
)
def test_a_file_beyond_a_bound_is_refused(content, message):
    with pytest.raises(DecodeError, match=message):
        decode_image(content, RULE)


def test_scans_are_counted_only_up_to_the_end_of_the_image():
    check_jpeg_scans(many_scans(5, trailer=b"\xff\xda" * 1000), 10**8)
    check_jpeg_scans(many_scans(500), 10**6)
    with pytest.raises(ValueError, match="more than 24 scans for 100000000 pixels"):
        check_jpeg_scans(many_scans(500), 10**8)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "WebP", "TIFF", "PPM"])
def test_an_ordinary_file_is_passed_on_unchanged(kind):
    content = encoded(kind)
    assert bounded(content, kind, max_pixels=10**6) is content
    for length in (*range(0, 60), len(content) // 2):
        assert bounded(content[:length], kind, max_pixels=10**6) == content[:length]


@pytest.mark.parametrize("comment", [b"", b"# made by hand\n# 255\n"])
@pytest.mark.parametrize("largest", [1, 2, 7, 100, 254, 256, 1000, 1023, 4095, 65534, 65535])
@pytest.mark.parametrize("kind", [b"P5", b"P6"])
def test_other_maximum_values_decode_as_in_pillow(kind, largest, comment):
    bands = 1 if kind == b"P5" else 3
    values = np.random.default_rng(largest).integers(0, 65536 if largest > 255 else 256, 40 * 50 * bands)
    data = values.astype(">u2" if largest > 255 else "u1").tobytes()
    content = kind + b"\n" + comment + b"50 40\n%d\n" % largest + data
    expected = PpmImageFile(io.BytesIO(content))
    found = PpmImageFile(io.BytesIO(bounded(content, "PPM", max_pixels=10**6)))
    assert found.mode == expected.mode
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_scans_are_counted_only_where_there_may_be_many(monkeypatch, mode, progressive):
    counted: list[int] = []
    monkeypatch.setattr(
        "loopfeed.preprocess.decoding.formats.check_jpeg_scans", lambda _, num_pixels: counted.append(num_pixels)
    )
    file = io.BytesIO()
    Image.fromarray(NOISE).convert(mode).save(file, "JPEG", progressive=progressive)
    decode_image(file.getvalue(), RULE)
    assert counted == [2000] * progressive
