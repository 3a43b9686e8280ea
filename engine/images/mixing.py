"""Mixup and cutmix: the images at positions 2k and 2k + 1 are mixed with each other, and so are their targets.

The partner is a function of the position, and both images of a pair share one draw, so that the result depends
neither on the batch nor on the number of devices. Shares are multiples of 2**-16: with 8-bit levels and one-hot
targets every product and sum is exact.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, Key, Shaped, UInt32

from loopfeed.engine.images.boxes import Boxes, mask_boxes
from loopfeed.engine.images.positions import Purpose, draw_words, to_choice, to_index, to_unit

WHOLE = 2**16
"""Share of an image in its mixture if it is not mixed: 1 in units of 2**-16."""


class Mixture(NamedTuple):
    """Parameters for mixing each of b images with its partner.

    Attributes:
        own_level: the share of the image's own levels (mixup), 0 … WHOLE.
        box: rectangle that is pasted from the partner (cutmix); empty to paste nothing.
        own_target: the share of the image's own label, 0 … WHOLE.
    """

    own_level: Int32[Array, "b"]
    box: Boxes
    own_target: Int32[Array, "b"]


def draw_mixture(keys: Key[Array, "b"], height: int, width: int, *, mixup_alpha: float, cutmix_alpha: float) -> Mixture:
    """Draw the mixing parameters of each pair of images.

    Args:
        keys: keys of b images from `loopfeed.engine.images.positions.image_keys`, b even, the first at an even
            position.
        height, width: size of the images, in pixels.
        mixup_alpha, cutmix_alpha: see `loopfeed.engine.images.settings.Augmentation`; at least one is not 0.
    """
    # A pair uses the key of its even position.
    pair_keys = keys[::2]
    cuts = to_choice(draw_words(pair_keys, Purpose.MIX_CHOICE)[:, 0, 0], 0.5)
    if not mixup_alpha or not cutmix_alpha:
        cuts = jnp.full(cuts.shape, bool(cutmix_alpha))
    own_level, own_target = (jnp.full(cuts.shape, WHOLE, jnp.int32) for _ in range(2))
    box = Boxes(*(jnp.zeros(cuts.shape, jnp.int32) for _ in Boxes._fields))
    if mixup_alpha:
        share = _to_share(draw_beta(draw_words(pair_keys, Purpose.MIXUP)[:, 0], mixup_alpha))
        own_level = own_target = jnp.where(cuts, WHOLE, share)
    if cutmix_alpha:
        drawn = draw_cut(draw_words(pair_keys, Purpose.CUTMIX, 2), height, width, cutmix_alpha)
        box = Boxes(*(jnp.where(cuts, value, 0) for value in drawn))
        area = (box.height * box.width).astype(jnp.float32) / (height * width)
        own_target = jnp.where(cuts, WHOLE - _to_share(area), own_target)
    mixture = Mixture(own_level, box, own_target)

    def repeat_for_both(per_pair: jax.Array) -> jax.Array:
        # `jnp.repeat` is a scatter, which runs element by element if it must be deterministic.
        return jnp.stack([per_pair, per_pair], axis=1).reshape(-1, *per_pair.shape[1:])[: keys.shape[0]]

    return jax.tree.map(repeat_for_both, mixture)


def draw_beta(words: UInt32[Array, "b 2"], alpha: float) -> Float32[Array, "b"]:
    """Draw from Beta(alpha, alpha) without rejection, from uniform words.

    Devroye's formula for the symmetric beta (1996, "Random variate generation in one line of code"): Student's t by
    Bailey's polar method, mapped into 0 … 1. With q = U**(1/alpha) and c = cos(2 pi V) it is
    1/2 + c · sqrt(1 - q) / (2 · sqrt(q + (1 - q) c²)).
    """
    # U is in (0, 1], so that its logarithm is finite.
    exponent = jnp.log(to_unit(words[:, 0]) + jnp.float32(2**-24)) / alpha
    power, rest = jnp.exp(exponent), -jnp.expm1(exponent)
    cosine = jnp.cos(jnp.float32(2 * math.pi) * to_unit(words[:, 1]))
    # Both terms are 0 together only if the power underflows.
    spread = jnp.maximum(power + rest * cosine * cosine, jnp.finfo(jnp.float32).tiny)
    return jnp.clip(0.5 + 0.5 * cosine * jnp.sqrt(rest / spread), 0, 1)


def draw_cut(words: UInt32[Array, "b 2 2"], height: int, width: int, alpha: float) -> Boxes:
    """Draw the rectangle that cutmix pastes from the partner, from uniform words.

    Its sides are sqrt(1 - Beta(alpha, alpha)) times those of the image, its centre is uniformly random, and it is
    clipped to the image.
    """
    side = jnp.sqrt(1 - draw_beta(words[:, 0], alpha))
    tops, heights = _draw_side(words[:, 1, 0], side, height)
    lefts, widths = _draw_side(words[:, 1, 1], side, width)
    return Boxes(tops, lefts, heights, widths)


def paste_partners(pixels: UInt32[Array, "b H W"], box: Boxes) -> UInt32[Array, "b H W"]:
    """Replace the area inside `box` of each packed image with the same area of its partner."""
    return jnp.where(mask_boxes(box, *pixels.shape[1:]), swap_partners(pixels), pixels)


def mix_levels(levels: Int32[Array, "b H W 3"], own_level: Int32[Array, "b"]) -> Float32[Array, "b H W 3"]:
    """Mix each image's levels (0 … 255) with its partner's, exactly."""
    own = own_level[:, None, None, None]
    return (own * levels + (WHOLE - own) * swap_partners(levels)).astype(jnp.float32) * jnp.float32(1 / WHOLE)


def mix_targets(targets: Float32[Array, "b K"], own_target: Int32[Array, "b"]) -> Float32[Array, "b K"]:
    """Mix each image's target with its partner's; rows of one-hot targets still sum to exactly 1."""
    own = own_target[:, None].astype(jnp.float32) * jnp.float32(1 / WHOLE)
    return own * targets + (1 - own) * swap_partners(targets)


def swap_partners(values: Shaped[Array, "b *rest"]) -> Shaped[Array, "b *rest"]:
    """Swap rows 2k and 2k + 1 of an array, so that each row contains its partner's values."""
    pairs = values.reshape(values.shape[0] // 2, 2, *values.shape[1:])
    return pairs[:, ::-1].reshape(values.shape)


def _draw_side(
    words: UInt32[Array, "b"], fraction: Float32[Array, "b"], length: int
) -> tuple[Int32[Array, "b"], Int32[Array, "b"]]:
    """Draw a segment that covers `fraction` (0 … 1) of a side; return its start and its clipped length."""
    half = jnp.floor(length * fraction).astype(jnp.int32) // 2
    middle = to_index(words, length)
    start, stop = jnp.maximum(middle - half, 0), jnp.minimum(middle + half, length)
    return start, stop - start


def _to_share(fraction: Float32[Array, "b"]) -> Int32[Array, "b"]:
    """Round fractions (0 … 1) to multiples of 1 / WHOLE."""
    return jnp.floor(fraction * WHOLE + 0.5).astype(jnp.int32)
