"""Colour jitter against Pillow's enhancers, colorsys, and plain integers."""

import colorsys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance

from loopfeed.engine.images.jitter import (
    change_brightness,
    change_contrast,
    change_saturation,
    draw_factors,
    join_planes,
    split_planes,
    turn_hue,
)
from loopfeed.preprocess.pixels import pack_rgb, unpack_rgb
from tests.test_resample import photograph

ENHANCERS = {
    change_brightness: ImageEnhance.Brightness,
    change_contrast: ImageEnhance.Contrast,
    change_saturation: ImageEnhance.Color,
}


def changed(change, images, amounts):
    """Run one operation on uint8 [B, H, W, 3]; return an array of the same shape."""
    run = jax.jit(lambda packed, amounts: join_planes(change(split_planes(packed), amounts)))
    return unpack_rgb(np.asarray(run(pack_rgb(images), jnp.array(amounts, jnp.int32))))


@pytest.mark.parametrize("change", ENHANCERS)
def test_equals_pillow(change):
    factors = [0, 1000, 2048, 4095, 4096, 4097, 6000, 8192]
    images = np.stack([photograph(seed) for seed in range(len(factors))])
    for image, before, factor in zip(changed(change, images, factors), images, factors, strict=True):
        expected = ENHANCERS[change](Image.fromarray(before)).enhance(factor / 4096)
        # Pillow cuts the fraction of a level off where this rounds.
        assert np.abs(image.astype(np.int16) - np.asarray(expected, np.int16)).max() <= 1


@pytest.mark.parametrize("turn", [-12288, -5000, -1, 1, 4096, 8192, 12288])
def test_hue_equals_colorsys(turn):
    random = np.random.default_rng(0)
    colours = random.integers(256, size=(400, 3))
    # Ties between channels, greys, black and white.
    colours[:60] = random.choice([0, 77, 255], size=(60, 3))
    found = changed(turn_hue, colours.astype(np.uint8).reshape(1, 20, 20, 3), [turn]).reshape(-1, 3)
    for colour, after in zip(colours, found, strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(colour / 255))
        expected = np.array(colorsys.hsv_to_rgb((hue + turn / 24576) % 1, saturation, value)) * 255
        # Exact before rounding; a half may go either way in float64.
        assert np.abs(after - expected).max() <= 0.5 + 1e-9


def test_contrast_of_a_large_white_image_does_not_overflow():
    def least_red(pixels):
        return change_contrast(split_planes(pixels), jnp.array([2048], jnp.int32))[0].min()

    white = np.full((1, 4096, 4096), 0xFFFFFF00, np.uint32)
    assert int(jax.jit(least_red)(white)) == 255
    with pytest.raises(ValueError, match=r"at most 2\*\*24 pixels, got 16781312: store smaller"):
        jax.eval_shape(least_red, jax.ShapeDtypeStruct((1, 4096, 4097), jnp.uint32))


@pytest.mark.parametrize(("strength", "least", "largest"), [(0.4, 2458, 5734), (1.0, 0, 8192), (3.0, 0, 16384)])
def test_factors_fill_their_range(strength, least, largest):
    words = np.linspace(0, 2**32 - 1, 50_000).astype(np.uint32)
    factors = draw_factors(jnp.asarray(words), strength)
    assert (int(factors.min()), int(factors.max())) == (least, largest)
    assert float(factors.mean()) == pytest.approx((least + largest) / 2, rel=1e-3)
