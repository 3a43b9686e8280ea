"""Pixels on the device: the same levels as the one definition of the layout, normalised."""

import jax
import jax.numpy as jnp
import numpy as np

from loopfeed.engine.images.unpack import PixelScale, unpack_pixels
from loopfeed.preprocess.pixels import pack_rgb, unpack_rgb

SCALE = PixelScale(
    mean=jnp.array([0.485, 0.456, 0.406], jnp.float32), std=jnp.array([0.229, 0.224, 0.225], jnp.float32)
)
RAW = PixelScale(mean=jnp.zeros(3, jnp.float32), std=jnp.full(3, 1 / 255, jnp.float32))


def all_levels():
    """uint32 [3, 16, 16]: each channel takes all 256 levels while the others take other ones."""
    level = np.arange(256).reshape(16, 16)
    others = np.stack([level, 255 - level, level * 7 % 256], axis=-1)
    return pack_rgb(np.stack([np.roll(others, turn, axis=-1) for turn in range(3)]).astype(np.uint8))


def test_every_level_of_every_channel():
    packed = all_levels()
    levels = unpack_rgb(packed)
    assert all(len(np.unique(levels[image, ..., channel])) == 256 for image in range(3) for channel in range(3))
    for function in (unpack_pixels, jax.jit(unpack_pixels)):
        images = function(packed, RAW)
        assert images.dtype == jnp.float32
        assert images.shape == (3, 16, 16, 3)
        np.testing.assert_array_equal(np.round(images), levels)


def test_equals_the_formula_in_float64():
    packed = all_levels()
    mean, std = (np.asarray(value, np.float64) for value in SCALE)
    expected = (unpack_rgb(packed) / 255 - mean) / std
    # Each of three float32 operations rounds by 2**-24 of values up to 1 before the division by std, at least 0.22.
    np.testing.assert_allclose(jax.jit(unpack_pixels)(packed, SCALE), expected, rtol=3 * 2**-24, atol=2**-24 / 0.22)
