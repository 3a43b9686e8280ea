"""Every colour mode against its arithmetic in numpy."""

import io
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageCms

from loopfeed.preprocess.decoding.colour import to_grey_or_rgb
from loopfeed.preprocess.decoding.decode import DecodeError, ResizeRule, decode_image

RULE = ResizeRule(size=16, resize=16, resample="nearest")
GREY = np.arange(256, dtype=np.uint8).reshape(16, 16)
RGB = np.random.default_rng(1).integers(0, 256, (16, 16, 3), dtype=np.uint8)
ALPHA = GREY.T.copy()


def decoded(image, kind="PNG", *, rule=RULE, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return decode_image(file.getvalue(), rule)


def three(grey):
    return np.repeat(np.asarray(grey)[..., None], 3, axis=-1)


def on_white(colour, alpha):
    opacity = alpha.astype(np.float64)[..., None] / 255
    return colour * opacity + 255 * (1 - opacity)


def test_grey_and_rgb_are_unchanged():
    np.testing.assert_array_equal(decoded(Image.fromarray(GREY)), three(GREY))
    np.testing.assert_array_equal(decoded(Image.fromarray(RGB)), RGB)
    for grey in (Image.fromarray(GREY), Image.fromarray(RGB)):
        assert to_grey_or_rgb(grey) is grey


def test_a_palette_is_looked_up():
    image = Image.fromarray(GREY).convert("P")
    palette = np.random.default_rng(2).integers(0, 256, (256, 3), dtype=np.uint8)
    image.putpalette(palette.tobytes())
    np.testing.assert_array_equal(decoded(image), palette[np.asarray(image)])


def test_transparent_pixels_are_blended_with_white():
    # Pillow composites in integers: one level of rounding.
    rgba = np.dstack([RGB, ALPHA])
    assert np.abs(decoded(Image.fromarray(rgba)) - on_white(RGB, ALPHA)).max() <= 1
    grey_alpha = Image.merge("LA", (Image.fromarray(GREY), Image.fromarray(ALPHA)))
    assert np.abs(decoded(grey_alpha) - on_white(three(GREY), ALPHA)).max() <= 1


def test_a_transparent_palette_entry_is_white():
    image = Image.fromarray(GREY).convert("P")
    image.putpalette(bytes(range(256)) * 3)
    palette = np.frombuffer(bytes(range(256)) * 3, np.uint8).reshape(256, 3)
    expected = palette[np.asarray(image)].copy()
    expected[np.asarray(image) == 7] = 255
    np.testing.assert_array_equal(decoded(image, transparency=7), expected)
    by_entry = bytes([0] * 128 + [255] * 128)
    expected = palette[np.asarray(image)].copy()
    expected[np.asarray(image) < 128] = 255
    np.testing.assert_array_equal(decoded(image, transparency=by_entry), expected)
    with_alpha = to_grey_or_rgb(Image.merge("RGBA", [Image.fromarray(GREY)] * 4).convert("PA"))
    assert with_alpha.mode == "RGB"


def test_sixteen_bits_are_scaled_and_rounded():
    values = (np.arange(256, dtype=np.uint16).reshape(16, 16) * 257 + np.uint16(100)).clip(0, 65535).astype(np.uint16)
    values[0, 0], values[15, 15] = 0, 65535
    expected = three(np.floor(values / 257.0 + 0.5).astype(np.uint8))
    np.testing.assert_array_equal(decoded(Image.fromarray(values)), expected)
    np.testing.assert_array_equal(decoded(Image.fromarray(values), "TIFF"), expected)
    big_endian = Image.frombytes("I;16B", (16, 16), values.astype(">u2").tobytes())
    np.testing.assert_array_equal(decoded(big_endian, "TIFF"), expected)
    np.testing.assert_array_equal(decoded(Image.fromarray(values.astype(np.int32)), "TIFF"), expected)
    portable = b"P5 16 16 65535\n" + values.astype(">u2").tobytes()
    np.testing.assert_array_equal(decode_image(portable, RULE), expected)


def test_every_sixteen_bit_value_is_rounded_to_the_nearest_level():
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    found = decode_image(file.getvalue(), ResizeRule(size=256, resize=256, resample="nearest"))
    # The nearest level to v / 257 in whole numbers; 257 is odd, so no value lies halfway.
    expected = (2 * values.astype(np.int64) + 257) // 514
    np.testing.assert_array_equal(found, three(expected))


def png(depth, colour, pixels, width, transparent):
    def chunk(kind, payload):
        return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))

    rows = b"".join(b"\0" + pixels for _ in range(width))
    header = struct.pack(">IIBBBBB", width, width, depth, colour, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent))
    return b"\x89PNG\r\n\x1a\n" + chunks + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("transparent", [0, 1, 3])
def test_a_transparent_grey_key_is_white_at_any_depth(depth, transparent):
    most = 2**depth - 1
    values = [place % (most + 1) for place in range(16)]
    packed = sum(value << depth * (15 - place) for place, value in enumerate(values)).to_bytes(2 * depth)
    row = [255 if value == transparent else round(value * 255 / most) for value in values]
    found = decode_image(png(depth, 0, packed, 16, (transparent,)), RULE)
    np.testing.assert_array_equal(found, three(np.tile(np.array(row), (16, 1))))


def test_a_sixteen_bit_transparent_colour_key_is_refused():
    encoded = png(16, 2, bytes([1, 2] * 48), 16, (0x102, 0x102, 0x102))
    with pytest.raises(
        DecodeError, match=r"16-bit colour is marked as transparent \(tRNS\); save the image with an alpha"
    ):
        decode_image(encoded, RULE)
    eight = decode_image(png(8, 2, bytes([7] * 48), 16, (7, 7, 7)), RULE)
    assert (eight == 255).all()


def test_floats_are_scaled_from_one_or_by_the_levels():
    unit = (GREY / 255.0).astype(np.float32)
    np.testing.assert_array_equal(decoded(Image.fromarray(unit), "TIFF"), three(GREY))
    rule = replace(RULE, levels="0:255")
    np.testing.assert_array_equal(decoded(Image.fromarray(GREY.astype(np.float32)), "TIFF", rule=rule), three(GREY))


@pytest.mark.parametrize(
    ("pixels", "reason"),
    [
        (
            np.full((4, 4), 70000, np.int32),
            "integer pixel values range from 70000 to 70000, but without --levels only 0 to 65535 are supported; give",
        ),
        (np.full((4, 4), -1, np.int32), "integer pixel values range from -1 to -1"),
        (
            np.full((4, 4), 256.0, np.float32),
            "float pixel values range from 256 to 256, but without --levels only 0 to 1 .* such as --levels 0:65535",
        ),
        (np.full((4, 4), np.nan, np.float32), "float pixel values range from nan to nan"),
    ],
)
def test_numbers_without_a_known_range_are_refused(pixels, reason):
    with pytest.raises(DecodeError, match=reason):
        decoded(Image.fromarray(pixels), "TIFF")


def cmyk_expectation(ink):
    ink = ink.astype(np.float64)
    return (255 - ink[..., :3]) * (255 - ink[..., 3:]) / 255


def test_cmyk_is_ink_on_white():
    ink = np.random.default_rng(4).integers(0, 256, (16, 16, 4), dtype=np.uint8)
    image = Image.frombytes("CMYK", (16, 16), ink.tobytes())
    assert np.abs(decoded(image, "TIFF") - cmyk_expectation(ink)).max() <= 1


@pytest.mark.parametrize("ink", [(0, 0, 0, 0), (255, 0, 0, 0), (0, 200, 100, 30), (0, 0, 0, 255)])
def test_adobes_inverted_cmyk_jpeg(ink):
    # JPEG at quality 100 rounds its coefficients: three levels.
    image = Image.new("CMYK", (16, 16), ink)
    found = decoded(image, "JPEG", quality=100)
    assert np.abs(found - cmyk_expectation(np.array(ink).reshape(1, 1, 4))).max() <= 3


def test_ycck_jpeg():
    # Adobe's transform 2: the three inks are stored as YCbCr of their inverse. Pillow cannot write it, but a CMYK file
    # of grey inks (C = M = Y) whose Adobe marker says 2 must be read as luma: Y = ink, Cb and Cr = the stored M, Y.
    file = io.BytesIO()
    Image.new("CMYK", (16, 16), (60, 127, 127, 20)).save(file, "JPEG", quality=100)
    encoded = bytearray(file.getvalue())
    marker = encoded.index(b"Adobe")
    encoded[marker + 11] = 2
    found = decode_image(bytes(encoded), RULE)
    # Stored bytes are inverted: Y = 195, Cb = Cr = 128, K = 235. Neutral chroma gives R = G = B = 195 before
    # libjpeg's inversion to ink, 60 after it; Pillow then inverts once more.
    stored_luma, stored_black = 195, 235
    ink = 255 - stored_luma
    expected = (255 - (255 - ink)) * stored_black / 255
    assert np.abs(found.astype(float) - expected).max() <= 3


def test_colour_profiles_are_ignored():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    np.testing.assert_array_equal(decoded(Image.fromarray(RGB), icc_profile=profile), RGB)


def whole(image):
    """Convert a whole image at once, as a reference for the conversion in tiles."""
    transparent = image.info.get("transparency")
    if image.mode == "I" or image.mode.startswith("I;16"):
        wide = np.asarray(image).astype(np.int64)
        grey = ((wide + 128) // 257).astype(np.uint8)
        if transparent is not None:
            grey[wide == transparent] = 255
        return Image.fromarray(grey)
    if image.mode == "F":
        values = np.asarray(image)
        return Image.fromarray(np.floor(values * 255.0 + 0.5).astype(np.uint8))
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def of_mode(mode, transparency):
    rng = np.random.default_rng(7)
    shape = (37, 53)
    if mode.startswith("I;16"):
        values = rng.integers(0, 65536, shape).astype(">u2" if mode == "I;16B" else "<u2")
        image = Image.frombytes(mode, shape[::-1], values.tobytes())
    elif mode == "I":
        image = Image.fromarray(rng.integers(0, 65536, shape, dtype=np.int32))
    elif mode == "F":
        image = Image.fromarray(rng.random(shape, dtype=np.float32))
    elif mode == "1":
        image = Image.fromarray(rng.random(shape) < 0.5)
    elif mode == "LAB":
        image = Image.frombytes("LAB", shape[::-1], rng.bytes(shape[0] * shape[1] * 3))
    elif mode in ("P", "PA"):
        image = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).convert("P")
        image.putpalette(rng.bytes(768))
        if mode == "PA":
            image = image.convert("PA")
            image.putalpha(Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)))
    else:
        bands = Image.getmodebands(mode)
        parts = [Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)) for _ in range(bands)]
        image = Image.merge(mode, parts) if bands > 1 else parts[0]
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


@pytest.mark.parametrize("tile_pixels", [1, 7, 53, 400, 2**20])
@pytest.mark.parametrize(
    ("mode", "transparency"),
    [
        *[(mode, None) for mode in ("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "P", "PA")],
        *[(mode, None) for mode in ("I", "I;16", "I;16B", "F")],
        ("L", 7), ("RGB", (1, 2, 3)), ("P", 9), ("P", bytes(range(256))), ("1", 0),
        ("I", 300), ("I;16", 40_000), ("I;16B", 0), ("I;16", 65_535),
    ],
)  # fmt: skip
def test_conversion_in_tiles_equals_conversion_of_the_whole_image(monkeypatch, mode, transparency, tile_pixels):
    monkeypatch.setattr("loopfeed.preprocess.decoding.colour._TILE_PIXELS", tile_pixels)
    found, expected = to_grey_or_rgb(of_mode(mode, transparency)), whole(of_mode(mode, transparency))
    assert (found.mode, found.size) == (expected.mode, expected.size)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
