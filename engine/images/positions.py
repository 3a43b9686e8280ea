"""Positions in the endless stream of images, and the random numbers for each position.

Every draw is a block of the Threefry-2x32 cipher (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3")
keyed by (seed, position) with counter (purpose, number): a function of only these four, never of the batch, the device
or other draws. Only `fold_in` is used, which is that cipher itself, so that no option of jax changes a draw. Does not
depend on images.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, Int32, Integer, Key, UInt32

# Separates these draws from every other use of the seed, such as the key of the initial parameters.
_DOMAIN = 0x6175676D
# Largest number of blocks that one purpose may draw for one image.
_MOST_BLOCKS = 256


class Purpose(enum.IntEnum):
    """Purpose of a random draw. Runs depend on these numbers: add new ones, but never change an existing one."""

    CROP = 1
    FLIP = 2
    BRIGHTNESS = 3
    CONTRAST = 4
    SATURATION = 5
    HUE = 6
    MIX_CHOICE = 7
    MIXUP = 8
    CUTMIX = 9
    ERASING = 10
    AUTO_AUGMENT = 11
    OWN_AUGMENTATION = 12
    MODEL = 13


class Positions(NamedTuple):
    """Positions of b images as unsigned 64-bit numbers in two words: jax disables 64-bit integers by default."""

    high: UInt32[Array, "b"]
    low: UInt32[Array, "b"]


def positions(
    step: Int32[Array, ""] | UInt32[Array, ""],
    batch: int,
    start: int | Int[Array, ""],
    count: int,
    first: tuple[UInt32[Array, ""], UInt32[Array, ""]] | None = None,
) -> Positions:
    """Return a device's exact image positions at a step: `count` consecutive numbers starting at step · batch + start.

    Args:
        step: number of batches before this one, ≥ 0.
        batch: images per step over all devices, 1 … 2**31 - 1.
        start: first row of this device in the batch; start + count ≤ batch.
        count: b, number of rows of this device.
        first: the position of the first image of step 0 in two words, high and low; None is 0.

    Raises:
        ValueError: if `batch` or `count` is out of range.
    """
    if not 1 <= batch < 2**31:
        raise ValueError(f"batch must lie in 1 … 2**31 - 1, got {batch}")
    if not 1 <= count <= batch:
        raise ValueError(f"a device's share of a batch of {batch} must be 1 … {batch} images, got {count}")
    high, low = _multiply(jnp.asarray(step).astype(jnp.uint32), jnp.uint32(batch))
    rows = jnp.asarray(start).astype(jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)
    if first is not None:
        high, low = high + first[0] + (low + first[1] < low).astype(jnp.uint32), low + first[1]
    sums = low + rows
    return Positions(high + (sums < rows).astype(jnp.uint32), sums)


def image_keys(seed_words: UInt32[Array, "2"], at: Positions) -> Key[Array, "b"]:
    """Return one Threefry key per image; it depends only on the seed and the image's position."""
    seed_key = jax.random.fold_in(jax.random.wrap_key_data(seed_words, impl="threefry2x32"), _DOMAIN)

    def key_of(high: UInt32[Array, ""], low: UInt32[Array, ""]) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.fold_in(seed_key, high), low)

    return jax.vmap(key_of)(at.high, at.low)


def draw_words(keys: Key[Array, "b"], purpose: Purpose, num_blocks: int = 1) -> UInt32[Array, "b {num_blocks} 2"]:
    """Draw uniform random words for each image, from a separate stream for each purpose.

    A longer draw begins with the same words.

    Args:
        keys: keys of the images, from `image_keys`.
        purpose: what the words are for.
        num_blocks: number of blocks per image, 1 … 256.
    """
    assert 1 <= num_blocks <= _MOST_BLOCKS
    blocks = jnp.arange(num_blocks, dtype=jnp.uint32) + jnp.uint32(purpose * _MOST_BLOCKS)

    def words_of(key: Key[Array, ""], block: UInt32[Array, ""]) -> UInt32[Array, "2"]:
        return jax.random.key_data(jax.random.fold_in(key, block))

    return jax.vmap(jax.vmap(words_of, (None, 0)), (0, None))(keys, blocks)


def key_of_purpose(keys: Key[Array, "b"], purpose: Purpose) -> Key[Array, "b"]:
    """Return one key per image for a purpose that draws its own numbers, from the keys of `image_keys`."""
    return jax.vmap(lambda key: jax.random.fold_in(key, jnp.uint32(purpose * _MOST_BLOCKS)))(keys)


def to_unit(words: UInt32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Convert uniform words to multiples of 2**-24 in [0, 1)."""
    return (words >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def to_index(words: UInt32[Array, "*shape"], count: int | Integer[Array, "..."]) -> Int32[Array, "*shape"]:
    """Convert uniform words to numbers in 0 … count - 1: floor(word · count / 2**32), for count ≤ 2**31.

    The probabilities of two outcomes differ by at most 2**-32.
    """
    return _multiply(words, jnp.asarray(count).astype(jnp.uint32))[0].astype(jnp.int32)


def to_choice(words: UInt32[Array, "*shape"], probability: float) -> Bool[Array, "*shape"]:
    """Convert uniform words to True with `probability` (0 … 1, rounded to 24 bits), else False."""
    # Integers are compared, so that a probability of 0 means never and 1 means always.
    return (words >> 8) < jnp.uint32(round(probability * 2**24))


def _multiply(
    left: UInt32[Array, "*shape"], right: UInt32[Array, "..."]
) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
    """Multiply two arrays exactly, in 16-bit halves; return the high and low words of the product."""
    left_high, left_low = left >> 16, left & 0xFFFF
    right_high, right_low = right >> 16, right & 0xFFFF
    lowest = left_low * right_low
    middle = left_high * right_low + (lowest >> 16)
    other = left_low * right_high + (middle & 0xFFFF)
    return left_high * right_high + (middle >> 16) + (other >> 16), left * right
