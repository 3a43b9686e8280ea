"""Resized crops against Pillow, against fractions, and against sums of integers in another order."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from loopfeed.engine.images.boxes import Boxes
from loopfeed.engine.images.crops import resize_boxes, triangle_weights
from loopfeed.preprocess.pixels import pack_rgb, unpack_rgb

BOXES = [(0, 0, 40, 56), (3, 7, 20, 20), (39, 55, 1, 1), (0, 10, 40, 3), (12, 0, 5, 56), (5, 6, 11, 13)]
resized = jax.jit(resize_boxes, static_argnums=2)
weights_of = jax.jit(triangle_weights, static_argnums=(2, 3))


def photograph(seed, height=40, width=56):
    """Smooth colours, hard edges and noise: uint8 [height, width, 3]."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    waves = 128 + 120 * np.sin(rows[..., None] / (3 + np.arange(3)) + columns[..., None] / 5)
    waves[height // 3 :, width // 4 : width // 2] = random.integers(256, size=3)
    return np.clip(waves + random.normal(0, 20, waves.shape), 0, 255).astype(np.uint8)


def boxes_of(places):
    return Boxes(*(jnp.array(values, jnp.int32) for values in zip(*places, strict=True)))


@pytest.mark.parametrize("shape", [(32, 32), (16, 24), (64, 48), (1, 1)])
def test_equals_pillows_crop_and_resize(shape):
    images = [photograph(seed) for seed in range(len(BOXES))]
    packed = resized(np.stack([pack_rgb(image) for image in images]), boxes_of(BOXES), shape)
    for image, (top, left, height, width), words in zip(images, BOXES, packed, strict=True):
        crop = Image.fromarray(image).crop((left, top, left + width, top + height))
        found = unpack_rgb(np.asarray(words)).astype(np.int16)
        at_once = np.asarray(crop.resize(shape[::-1], Image.Resampling.BILINEAR), np.int16)
        # Pillow may resize the columns first; levels between the passes are then rounded elsewhere.
        assert np.abs(found - at_once).max() <= 1
        across = crop.resize((shape[1], height), Image.Resampling.BILINEAR)
        off = np.abs(found - np.asarray(across.resize(shape[::-1], Image.Resampling.BILINEAR), np.int16))
        # Weights of 16 bits in place of Pillow's 22 move a sum by at most 255 · 2**-17 levels for each pixel that
        # counts, so that few sums come to lie on the other side of a half.
        assert off.max() <= 1
        assert (off > 0).mean() < 0.01


@pytest.mark.parametrize("target", [1, 5, 16, 40])
def test_weights_equal_fractions(target):
    starts, lengths = [0, 3, 15, 4], [16, 7, 1, 12]
    weights = weights_of(jnp.array(starts), jnp.array(lengths), 16, target)
    for matrix, start, length in zip(np.asarray(weights), starts, lengths, strict=True):
        reach = max(Fraction(1), Fraction(length, target))
        for row in range(target):
            centre = Fraction(2 * row + 1, 2) * Fraction(length, target)
            distances = [abs(Fraction(2 * column + 1, 2) - centre) for column in range(length)]
            heights = [max(Fraction(0), 1 - distance / reach) for distance in distances]
            exact = [height / sum(heights) for height in heights]
            found = [Fraction(float(weight)) for weight in matrix[row, start : start + length]]
            # Rounded to the nearest of 2**-16; the quotient's own rounding decides ties.
            assert all(weight * 2**16 == int(weight * 2**16) for weight in found)
            assert max(abs(a - b) for a, b in zip(found, exact, strict=True)) <= Fraction(1, 2**17) + Fraction(1, 2**24)
            assert np.count_nonzero(matrix[row]) == sum(weight != 0 for weight in found)


def test_every_sum_is_exact():
    """The same in 64-bit integers: nothing is left to the order of a sum or the precision of a product."""
    images = np.stack([photograph(seed) for seed in range(len(BOXES))])
    boxes = boxes_of(BOXES)
    across = (np.asarray(weights_of(boxes.left, boxes.width, 56, 24)) * 2**16).astype(np.int64)
    down = (np.asarray(weights_of(boxes.top, boxes.height, 40, 24)) * 2**16).astype(np.int64)
    levels = np.minimum((np.einsum("bjw,bhwc->bhjc", across, images.astype(np.int64)) + 2**15) >> 16, 255)
    levels = np.minimum((np.einsum("bih,bhjc->bijc", down, levels) + 2**15) >> 16, 255)
    np.testing.assert_array_equal(resized(pack_rgb(images), boxes, (24, 24)), pack_rgb(levels.astype(np.uint8)))
