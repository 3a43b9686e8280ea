"""Crops and mirror images of packed words against NumPy's slices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed.engine.images.boxes import BLOCKS_OF_BOX
from loopfeed.engine.images.crops import centre_crop, draw_crop_boxes, flip_horizontally, random_crop
from loopfeed.preprocess.decoding.decode import crop_offset
from tests.threefry_reference import index


def random_pixels(num, height, width, seed=0):
    return np.random.default_rng(seed).integers(2**32, size=(num, height, width), dtype=np.uint32)


@pytest.mark.parametrize("stored", [(8, 8), (9, 12), (11, 7), (10, 13)])
@pytest.mark.parametrize("size", [(7, 7), (6, 5)])
def test_centre_crop_begins_where_packing_does(stored, size):
    pixels = random_pixels(2, *stored)
    top, left = crop_offset(stored[0], size[0]), crop_offset(stored[1], size[1])
    np.testing.assert_array_equal(centre_crop(pixels, size), pixels[:, top : top + size[0], left : left + size[1]])


def test_centre_crop_larger_than_the_image():
    with pytest.raises(ValueError, match=r"must fit into the stored image, got 9×8 px out of 8×8 px: .* smaller size"):
        centre_crop(random_pixels(1, 8, 8), (9, 8))


@pytest.mark.parametrize(
    ("mode", "padding", "shape"),
    [
        ("zeros", 0, (5, 6)),
        ("zeros", 3, (9, 10)),
        ("reflect", 3, (9, 10)),
        ("reflect", 4, (17, 18)),
        ("zeros", 2, (1, 1)),
    ],
)
def test_random_crop_equals_numpy(mode, padding, shape):
    pixels = random_pixels(64, 9, 10)
    words = np.random.default_rng(1).integers(2**32, size=(64, 2), dtype=np.uint32)
    crops = jax.jit(random_crop, static_argnums=(2, 3, 4))(pixels, words, shape, padding, mode)
    assert crops.dtype == np.uint32
    for crop, image, (row, column) in zip(crops, pixels, words.tolist(), strict=True):
        padded = np.pad(image, padding, mode="constant" if mode == "zeros" else "reflect")
        top = index(row, padded.shape[0] - shape[0] + 1)
        left = index(column, padded.shape[1] - shape[1] + 1)
        np.testing.assert_array_equal(crop, padded[top : top + shape[0], left : left + shape[1]])


def test_every_crop_position_is_equally_likely():
    # Each pixel says where it stands, so that a crop of one pixel tells its place.
    pixels = np.broadcast_to(np.arange(81, dtype=np.uint32).reshape(9, 9), (20_250, 9, 9))
    words = np.random.default_rng(2).integers(2**32, size=(20_250, 2), dtype=np.uint32)
    counts = np.bincount(
        np.asarray(random_crop(jnp.asarray(pixels), jnp.asarray(words), (1, 1), 0, "zeros")).ravel(), minlength=81
    )
    # 250 expected in each of 81 places; the sum of squares has mean 80 and standard deviation 12.6.
    assert ((counts - 250) ** 2 / 250).sum() < 80 + 4 * 12.6


def test_flip():
    pixels = random_pixels(4, 3, 5)
    flips = np.array([True, False, False, True])
    flipped = flip_horizontally(jnp.asarray(pixels), jnp.asarray(flips))
    for image, before, flip in zip(flipped, pixels, flips, strict=True):
        np.testing.assert_array_equal(image, np.fliplr(before) if flip else before)


@pytest.mark.parametrize(
    ("height", "width", "ratio_range", "expected"),
    [
        (100, 40, (3 / 4, 4 / 3), (23, 0, 53, 40)),
        (40, 100, (3 / 4, 4 / 3), (0, 23, 40, 53)),
        (40, 40, (2.0, 3.0), (10, 0, 20, 40)),
        (40, 44, (3 / 4, 4 / 3), (0, 0, 40, 44)),
    ],
)
def test_a_crop_that_never_fits_is_the_centre(height, width, ratio_range, expected):
    # The whole area in another aspect than the image's: none of the ten attempts fits.
    words = np.zeros((5, BLOCKS_OF_BOX, 2), np.uint32)
    boxes = draw_crop_boxes(jnp.asarray(words), height, width, (1.0, 1.0), ratio_range)
    assert {tuple(box) for box in np.stack(boxes, axis=1).tolist()} == {expected}
