"""Decoding, against Pillow's plain pipeline, numpy's arithmetic and torchvision's documented geometry."""

import contextlib
import io
import struct
import threading
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from loopfeed.preprocess.decoding.decode import (
    RESAMPLERS,
    DecodeError,
    ResizeRule,
    crop_offset,
    decode_image,
)


def encode(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def photograph(width, height, seed=0):
    """A smooth random field with hard edges in it: both what photographs have."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8))
    pixels = np.array(coarse.resize((width, height), Image.Resampling.BICUBIC))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = rng.integers(0, 256, 3)
    return Image.fromarray(pixels)


def plain_pipeline(encoded, rule):
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    short, long = sorted(image.size)
    new_long = int(rule.resize * long / short)
    width, height = (rule.resize, new_long) if image.width <= image.height else (new_long, rule.resize)
    resized = image.resize((width, height), RESAMPLERS[rule.resample])
    left, top = round((width - rule.size) / 2.0), round((height - rule.size) / 2.0)
    return np.asarray(resized.crop((left, top, left + rule.size, top + rule.size)))


SMALL = ResizeRule(size=16, resize=16, resample="nearest")


@pytest.mark.parametrize(
    "size", [(500, 375), (333, 500), (224, 224), (256, 256), (40, 30), (1, 1), (3, 200), (799, 256), (257, 1023)]
)
@pytest.mark.parametrize("resample", ["bicubic", "bilinear"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 30}], ids=str)
def test_jpeg_equals_plain_pillow(size, resample, options):
    encoded = encode(photograph(*size), "JPEG", **options)
    rule = ResizeRule(resample=resample)
    pixels = decode_image(encoded, rule)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (224, 224, 3)
    # Only the crop is resampled, from a box with float32 corners: a rounded value may fall to the other side.
    assert np.abs(pixels - plain_pipeline(encoded, rule).astype(int)).max() <= 1


@settings(max_examples=40)
@given(
    width=st.integers(1, 90),
    height=st.integers(1, 90),
    size=st.integers(1, 40),
    extra=st.integers(0, 20),
    resample=st.sampled_from(sorted(RESAMPLERS)),
    grey=st.booleans(),
)
def test_any_geometry_equals_plain_pillow(width, height, size, extra, resample, grey):
    image = photograph(width, height, seed=width * height)
    encoded = encode(image.convert("L") if grey else image, "JPEG")
    rule = ResizeRule(size, size + extra, resample)
    difference = np.abs(decode_image(encoded, rule) - plain_pipeline(encoded, rule).astype(int))
    assert difference.max() <= 2  # of rounding, as above


@pytest.mark.parametrize("size", [(600, 2), (2000, 1), (500, 1)])
@pytest.mark.parametrize("resample", ["bicubic", "lanczos"])
def test_a_narrow_image_needs_no_more_room_than_its_crop(size, resample):
    encoded = encode(photograph(*size))
    rule = ResizeRule(size=56, resize=64, resample=resample)
    pixels = decode_image(encoded, rule, max_pixels=2000)
    # Two roundings, and float32 corners, which at hundreds of times the size are a hundredth of a pixel off.
    assert np.abs(pixels - plain_pipeline(encoded, rule).astype(int)).max() <= 2
    with pytest.raises(DecodeError, match=f"{size[0]}×{size[1]} is so narrow"):
        decode_image(encoded, ResizeRule(size=56, resize=64, resample="nearest"), max_pixels=2000)


@pytest.mark.parametrize(
    ("length", "offset"), [(224, 0), (225, 0), (226, 1), (227, 2), (256, 16), (341, 58), (343, 60)]
)
def test_centre_crop_rounds_half_to_even(length, offset):
    assert crop_offset(length, 224) == offset


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation(kind):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    encoded = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert (decode_image(encoded, SMALL) == [255, 0, 0]).all()


UPRIGHT = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
# How a camera stores the upright picture under each orientation (TIFF 6.0, tag 274: row 0 is …, column 0 is …).
STORED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.swapaxes(0, 1),
    6: np.rot90(UPRIGHT, 1),
    7: UPRIGHT[::-1, ::-1].swapaxes(0, 1),
    8: np.rot90(UPRIGHT, -1),
}


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(STORED[orientation]))
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    encoded = encode(image, kind, exif=exif, **options)
    np.testing.assert_array_equal(decode_image(encoded, SMALL), UPRIGHT)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_a_jpeg_comes_before_resizing(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    rule = ResizeRule(size=20, resize=24)
    stored = encode(photograph(61, 40), "JPEG", quality=95)
    turned = Image.open(io.BytesIO(encode(photograph(61, 40), "JPEG", quality=95, exif=exif)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = decode_image(encode(photograph(61, 40), "JPEG", quality=95, exif=exif), rule)
    steps = {1: (0, 0), 2: (1, 0), 3: (0, 2), 4: (1, 2), 5: (1, 1), 6: (0, 3), 7: (1, 3), 8: (0, 1)}
    mirror, quarter_turns = steps[orientation]
    pixels = np.asarray(turned)
    pixels = np.rot90(pixels[:, ::-1] if mirror else pixels, quarter_turns)
    expected = plain_pipeline(encode(Image.fromarray(np.ascontiguousarray(pixels))), rule)
    assert np.abs(found - expected.astype(int)).max() <= 1  # of rounding
    assert (orientation == 1) == np.array_equal(found, decode_image(stored, rule))


GOOD = encode(photograph(64, 48), "JPEG")

BAD_FILES = {
    "empty": (b"", "the file is empty"),
    "text": (b"<html>404</html>", r"not an image .*: it is an HTML page, .*; download it again$"),
    "zeros": (bytes(1000), "not an image"),
    "pdf": (b"%PDF-1.4 and so on", "not an image"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not an image"),
    "truncated jpeg": (GOOD[: len(GOOD) // 2], "cannot decode as JPEG: .*truncated"),
    "jpeg header alone": (GOOD[:20], "cannot decode as JPEG: "),
    "truncated png": (encode(photograph(64, 48))[:2000], "cannot decode as PNG: .*truncated"),
    "png without pixels": (encode(photograph(64, 48))[:33], "cannot decode as PNG: "),
    "png signature alone": (encode(photograph(64, 48))[:8], "cannot decode as PNG: "),
    "truncated gif": (encode(photograph(64, 48), "GIF")[:900], "cannot decode as GIF: "),
    "truncated webp": (encode(photograph(64, 48), "WEBP")[:100], "cannot decode as WebP: "),
    "truncated bmp": (encode(photograph(64, 48), "BMP")[:900], "cannot decode as BMP: .*truncated"),
    "truncated tiff": (encode(photograph(64, 48), "TIFF")[:900], "cannot decode as TIFF: "),
    "truncated ppm": (encode(photograph(64, 48), "PPM")[:900], "cannot decode as PPM: "),
    "narrow": (encode(Image.new("L", (1, 60000))), "1×60000 is so narrow that .* makes 256×15360000 pixels"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_with_its_reason(case):
    encoded, reason = BAD_FILES[case]
    with pytest.raises(DecodeError, match=reason) as caught:
        decode_image(encoded, ResizeRule())
    assert "\n" not in str(caught.value)
    assert "object at 0x" not in str(caught.value)


def png_header(width, height):
    whole = encode(Image.new("L", (1, 1)))
    body = b"IHDR" + struct.pack(">II", width, height) + bytes([8, 0, 0, 0, 0])
    return whole[:12] + body + struct.pack(">I", zlib.crc32(body)) + whole[33:]


@pytest.mark.parametrize("size", [(20000, 20000), (10000, 9000), (100000, 900)])
def test_a_bomb_is_refused_before_its_pixels_exist(size):
    with pytest.raises(DecodeError, match=f"{size[0]}×{size[1]} is more than the 89478485 pixels allowed"):
        decode_image(png_header(*size), ResizeRule())
    with pytest.raises(DecodeError, match=r"64×48 is more than the 3071 pixels"):
        decode_image(GOOD, ResizeRule(), max_pixels=3071)


def test_a_gif_whose_frame_outgrows_its_screen():
    # Pillow warns of a bomb while it opens the file; here that must become the reason.
    encoded = bytearray(encode(Image.new("L", (8, 8)), "GIF"))
    frame = encoded.index(b"\x2c\0\0\0\0\x08\0\x08\0")
    encoded[frame + 5 : frame + 9] = struct.pack("<HH", 65535, 2000)
    with pytest.raises(DecodeError, match="65535×2000 is more than the 89478485 pixels allowed"):
        decode_image(bytes(encoded), SMALL)


@settings(max_examples=150)
@given(data=st.data())
def test_damage_ends_in_an_image_or_a_reason(data):
    kind = data.draw(st.sampled_from(["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM"]))
    encoded = bytearray(encode(photograph(24, 20), kind))
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(encoded) - 1), st.integers(0, 255)), max_size=6)
    ):
        encoded[place] = value
    encoded = encoded[: data.draw(st.integers(0, len(encoded)))]
    with contextlib.suppress(DecodeError):  # any other exception, or a warning, fails
        assert decode_image(bytes(encoded), SMALL).shape == (16, 16, 3)


def test_threads_decode_alike_and_no_warning_is_printed():
    exif = b"Exif\0\0II*\0" + (8).to_bytes(4, "little") + b"\xff\xff" + bytes(20)
    files = [encode(photograph(64, 48, seed), "JPEG", exif=exif) for seed in range(8)]
    files += [encode(photograph(30, 48, seed), kind) for seed in range(4) for kind in ("TIFF", "GIF", "PNG")]
    rule = ResizeRule(size=32, resize=32)
    alone = [decode_image(each, rule) for each in files]
    barrier = threading.Barrier(4)

    def work(_):
        barrier.wait(timeout=30)
        return [decode_image(each, rule) for each in files]

    with ThreadPoolExecutor(4) as pool:  # warnings are errors in this suite: one that leaks fails the file
        for together in pool.map(work, range(4)):
            np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size must be a whole number from 1 to 4096, got 0"),
        ({"size": 224.0}, "size must be a whole number"),
        ({"size": True}, "size must be a whole number"),
        ({"resize": 5000}, "resize must be a whole number from 1 to 4096, got 5000"),
        ({"size": 224, "resize": 200}, "resize must be at least size.*use a resize of 224 or more"),
        ({"resample": "cubic"}, "resample must be one of nearest, .*, got 'cubic'"),
    ],
)
def test_a_rule_validates_itself(settings, message):
    with pytest.raises(ValueError, match=message):
        ResizeRule(**settings)


def test_a_rule_survives_json():
    rule = ResizeRule(size=64, resize=72, resample="lanczos")
    assert rule.to_json() == {"size": 64, "resize": 72, "resample": "lanczos"}
    assert ResizeRule.from_json(rule.to_json()) == rule
    with pytest.raises(ValueError, match=r"must have the keys \['resample', 'resize', 'size'\], found \['crop', "):
        ResizeRule.from_json({**rule.to_json(), "crop": 1})
