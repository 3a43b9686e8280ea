"""Conversion of packed pixels to normalised floats, on the device.

The host never handles floats: it sends the same uint32 words whatever is done with them here.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, UInt8, UInt32

# One level of 255.
LEAST_STD = 1 / 255
"""The least standard deviation to divide by: a channel without variance (blank images) must not give infinity."""


class PixelScale(NamedTuple):
    """Mean and standard deviation of the pixels, passed as runtime values so that one program serves every data set.

    Attributes:
        mean, std: of the channels (R, G, B) on the scale 0 … 1.
    """

    mean: Float32[Array, "3"]
    std: Float32[Array, "3"]


def pack_dense(words: UInt32[Array, "B H words"]) -> UInt32[Array, "B H words*4//3"]:
    """Convert dense pixels, 3·W/4 words a row, to packed ones (`loopfeed.preprocess.pixels`)."""
    B, H, num_words = words.shape
    bytes_in_order = lax.bitcast_convert_type(words, jnp.uint8)  # the least significant byte first
    red, green, blue = jnp.moveaxis(bytes_in_order.reshape(B, H, num_words * 4 // 3, 3).astype(jnp.uint32), -1, 0)
    # Because of the barrier the rest compiles as for packed words, so that the bits are the same.
    return lax.optimization_barrier(red << 24 | green << 16 | blue << 8)


def unpack_pixels(pixels: UInt32[Array, "B H W"], scale: PixelScale) -> Float32[Array, "B H W 3"]:
    """Unpack words (R<<24 | G<<16 | B<<8) to (level / 255 - mean) / std."""
    shifts = jnp.array([24, 16, 8], jnp.uint32)
    levels = (pixels[..., None] >> shifts) & jnp.uint32(0xFF)
    return normalise_levels(levels.astype(jnp.float32), scale)


def to_levels(images: Float[Array, "B H W 3"], scale: PixelScale) -> UInt8[Array, "B H W 3"]:
    """Undo the normalisation of images: return the nearest levels."""
    levels = jnp.round((images.astype(jnp.float32) * scale.std + scale.mean) * 255)
    return jnp.clip(jnp.nan_to_num(levels), 0, 255).astype(jnp.uint8)


def normalise_levels(levels: Float32[Array, "B H W 3"], scale: PixelScale) -> Float32[Array, "B H W 3"]:
    """Normalise levels in 0 … 255, integers or not, to (level / 255 - mean) / std."""
    return (levels / 255 - scale.mean) / scale.std
