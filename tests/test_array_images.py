"""Arrays as image files: pixel for pixel through the decoder, and one clear error for whatever is no image."""

import math

import numpy as np
import pytest

from loopfeed.preprocess.decoding.decode import ResizeRule, decode_image
from loopfeed.preprocess.decoding.formats import open_pixels
from loopfeed.preprocess.decoding.known_formats import sniff
from loopfeed.preprocess.sources.array_images import encode_array

SIDE = 37
RULE = ResizeRule(SIDE, SIDE)


def values(*shape: int, kind: str = "u1") -> np.ndarray:
    """Return random pixels; the first values look like the end of a header, and like a comment."""
    found = np.random.default_rng(5).integers(0, np.iinfo(kind).max, shape, np.dtype(kind).type, endpoint=True)
    found.reshape(-1)[:4] = [10, 35, 49, 10]
    return found.astype(kind)


def grey(pixels: np.ndarray) -> np.ndarray:
    return np.repeat(pixels.reshape(SIDE, SIDE, 1), 3, axis=2)


@pytest.mark.parametrize(
    ("pixels", "name"),
    [
        (values(SIDE, SIDE), "PPM"),
        (values(SIDE, SIDE, 1), "PPM"),
        (values(SIDE, SIDE, 3), "PPM"),
        (values(SIDE, 2 * SIDE, 3)[:, ::2], "PPM"),
        (values(3, SIDE, SIDE).transpose(1, 2, 0), "PPM"),
        (np.asfortranarray(values(SIDE, SIDE, 3)), "PPM"),
    ],
    ids=["grey", "one channel", "RGB", "strided", "channels moved", "Fortran order"],
)
def test_pixels_of_8_bits_are_decoded_as_they_are(pixels: np.ndarray, name: str) -> None:
    encoded = encode_array(pixels)
    known = sniff(encoded)
    assert known is not None
    assert known.name == name
    np.testing.assert_array_equal(decode_image(encoded, RULE), pixels if pixels.size > SIDE**2 else grey(pixels))


@pytest.mark.parametrize("shape", [(1, 1), (1, 7, 3), (7, 1, 4), (5, 3, 3), (2, 9, 1)], ids=str)
def test_height_and_width_are_those_of_the_array(shape: tuple[int, ...]) -> None:
    pixels = np.arange(math.prod(shape), dtype=np.uint8).reshape(shape)
    known = sniff(encode_array(pixels))
    assert known is not None
    image = open_pixels(encode_array(pixels), known, max_pixels=100).image
    np.testing.assert_array_equal(np.asarray(image).reshape(shape), pixels)
    assert image.size == (shape[1], shape[0])


@pytest.mark.parametrize("kind", ["u1", "<u2", ">u2"])
def test_alpha_is_put_on_white(kind: str) -> None:
    pixels = values(SIDE, SIDE, 4, kind=kind)
    most = np.iinfo(kind).max
    pixels[:12, :, 3], pixels[12:24, :, 3] = 0, most
    decoded = decode_image(encode_array(pixels), RULE)
    assert (decoded[:12] == 255).all()
    high = pixels[12:24, :, :3] >> (8 * np.dtype(kind).itemsize - 8)
    np.testing.assert_array_equal(decoded[12:24], high)
    alpha = pixels[24:, :, 3:].astype(np.float64) / most
    np.testing.assert_allclose(decoded[24:], (1 - alpha) * 255 + alpha * pixels[24:, :, :3] * 255 / most, atol=2.0)


@pytest.mark.parametrize("kind", ["<u2", ">u2"])
@pytest.mark.parametrize("channels", [(), (1,), (3,)], ids=str)
def test_16_bits_are_scaled_by_the_levels(kind: str, channels: tuple[int, ...]) -> None:
    pixels = values(SIDE, SIDE, *channels, kind=kind)
    encoded, wide = encode_array(pixels), pixels.astype(np.float64).reshape(SIDE, SIDE, -1)
    right = np.floor(wide * 255 / 65535 + 0.5)
    np.testing.assert_array_equal(decode_image(encoded, RULE), np.broadcast_to(right, (SIDE, SIDE, 3)))
    right = np.floor(np.clip(wide, 0, 4095) * 255 / 4095 + 0.5)
    levelled = decode_image(encoded, ResizeRule(SIDE, SIDE, levels="0:4095"))
    np.testing.assert_array_equal(levelled, np.broadcast_to(right, (SIDE, SIDE, 3)))


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.zeros((4, 4, 3), np.float32), r"must be uint8 .* got float32; convert floats .*round\(\)"),
        (np.zeros((4, 4), bool), r"got bool; convert them with 255 \* pixels"),
        (np.zeros((4, 4), np.int64), r"got int64; convert them with \.astype"),
        (np.zeros((4, 4), np.uint32), r"got uint32; convert them with \.astype"),
        (np.zeros((3, 8, 9), np.uint8), r"got \[3, 8, 9\]; move its channels last with \.transpose\(1, 2, 0\)"),
        (np.zeros((8, 9, 2), np.uint8), r"must be \[H, W\].* got \[8, 9, 2\]; reshape it"),
        (np.zeros((8, 9, 5), np.uint16), r"got \[8, 9, 5\]"),
        (np.zeros(784, np.uint8), r"got \[784\]; reshape it"),
        (np.zeros((2, 4, 4, 3), np.uint8), r"got \[2, 4, 4, 3\]"),
        (np.zeros((), np.uint8), r"got \[\]"),
        (np.zeros((0, 4), np.uint8), r"at least one pixel, got the shape \[0, 4\]"),
        (np.zeros((4, 0, 3), np.uint8), r"at least one pixel, got the shape \[4, 0, 3\]"),
    ],
    ids=str,
)
def test_what_is_no_image_is_refused_by_its_shape_or_type(pixels: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_array(pixels)
