"""Packed pixels to normalised floats, on the device.

The host never touches a float: the same uint32 words cross whatever is done with them here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class PixelScale(NamedTuple):
    """What normalises the pixels: runtime values, so that another data set needs no other program.

    Attributes:
        mean, std: float32 [3], of each channel (R, G, B) on the scale 0 … 1.
    """

    mean: jax.Array
    std: jax.Array


def pack_dense(words: jax.Array) -> jax.Array:
    """Makes uint32 [B, H, 3·W/4] words of the dense layout packed ones, uint32 [B, H, W] (`preprocess.pixels`)."""
    B, H, num_words = words.shape
    bytes_in_order = lax.bitcast_convert_type(words, jnp.uint8)  # the least significant byte first
    red, green, blue = jnp.moveaxis(bytes_in_order.reshape(B, H, num_words * 4 // 3, 3).astype(jnp.uint32), -1, 0)
    # What follows is compiled as for packed ones, and gives the same bits.
    return lax.optimization_barrier(red << 24 | green << 16 | blue << 8)


def unpack_pixels(pixels: jax.Array, scale: PixelScale) -> jax.Array:
    """Unpacks uint32 [B, H, W] words (R<<24 | G<<16 | B<<8) to float32 [B, H, W, 3], (value / 255 - mean) / std."""
    shifts = jnp.array([24, 16, 8], jnp.uint32)
    levels = (pixels[..., None] >> shifts) & jnp.uint32(0xFF)
    return normalise_levels(levels.astype(jnp.float32), scale)


def normalise_levels(levels: jax.Array, scale: PixelScale) -> jax.Array:
    """Normalises float32 [B, H, W, 3] levels, 0 … 255 and whole or between, to (level / 255 - mean) / std."""
    return (levels / 255 - scale.mean) / scale.std
