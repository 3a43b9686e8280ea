"""The augmentation pipeline on the device, between the infeed and the network.

Every random draw is a function of (seed, position), see `loopfeed.engine.images.positions`; the host sends the same
packed words whatever the settings. Up to the normalisation all arithmetic on pixels is exact, so that batch size,
sharding and kernels do not change a single bit. Does not depend on the loop.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Key, UInt32

from loopfeed.engine.given_values import describe_given, traced
from loopfeed.engine.images.auto_augment import auto_augment
from loopfeed.engine.images.boxes import BLOCKS_OF_BOX, Boxes, BoxRule, draw_boxes, mask_boxes
from loopfeed.engine.images.crops import (
    centre_crop,
    crop_pictures,
    draw_crop_boxes,
    flip_horizontally,
    random_crop,
    read_extents,
    resize_boxes,
    square_boxes,
)
from loopfeed.engine.images.jitter import (
    change_brightness,
    change_contrast,
    change_saturation,
    draw_factors,
    draw_turns,
    join_planes,
    split_planes,
    turn_hue,
)
from loopfeed.engine.images.mixing import draw_mixture, mix_levels, mix_targets, paste_partners
from loopfeed.engine.images.positions import Positions, Purpose, draw_words, image_keys, key_of_purpose, to_choice
from loopfeed.engine.images.settings import Augmentation
from loopfeed.engine.images.unpack import PixelScale, normalise_levels, unpack_pixels
from loopfeed.engine.scopes import AUGMENT, UNPACK
from loopfeed.preprocess.extents import Whole

# Zhong et al. (2020), arXiv:1708.04896, and torchvision's RandomErasing.
AREA_RANGE = (0.02, 0.33)
RATIO_RANGE = (1 / 3.3, 1 / 0.3)
"""Range of width / height; torchvision draws height / width in 0.3 … 3.3."""

BLOCKS_OF_ERASING = 1 + BLOCKS_OF_BOX

type UserAugmentation = Callable[[Float32[Array, "B H W 3"], Key[Array, "B"]], Float32[Array, "B H W 3"]]
"""(normalised images, one PRNG key per image) → images."""


def augment_images(
    augmentation: Augmentation,
    pixels: UInt32[Array, "b H W"],
    positions: Positions,
    seed_words: UInt32[Array, "2"],
    scale: PixelScale,
    extents: Int32[Array, "b"] | None = None,
) -> tuple[Float32[Array, "b h w 3"], Int32[Array, "b"] | None]:
    """Augment and normalise one device's part of a batch, b images; called while tracing.

    Args:
        augmentation: the settings, static.
        pixels: packed.
        positions: positions of the images, see `loopfeed.engine.images.positions`. If images are mixed, the first must
            be even, as it is if every device takes the same even number of images.
        seed_words: the seed's high and low half.
        scale: mean and standard deviation of the pixels.
        extents: where on its canvas each picture is, if the settings have `whole`.

    Returns:
        The images, with (h, w) = `augmentation.output_shape(H, W)`, and the share of each image's own label in its
        target for `make_targets`, in units of 1 / `WHOLE`; None if nothing is mixed. With the default settings the
        images equal those of `unpack_pixels`, bit for bit.

    Raises:
        ValueError: if the augmentation does not fit the images, or the batch to mix is odd.
    """
    augmentation.check_batch(pixels.shape[0])
    height, width = augmentation.output_shape(*pixels.shape[1:])
    with jax.named_scope(AUGMENT):
        keys = image_keys(seed_words, positions)
        pixels = _crop(augmentation, pixels, extents, keys)
        if augmentation.horizontal_flip:
            flips = to_choice(draw_words(keys, Purpose.FLIP)[:, 0, 0], augmentation.horizontal_flip)
            pixels = flip_horizontally(pixels, flips)
        if augmentation.auto_augment != "off":
            pixels = auto_augment(augmentation, pixels, keys)
        pixels = jitter_colours(augmentation, pixels, keys)
    mix_weight = None
    if augmentation.mixes:
        with jax.named_scope(AUGMENT):
            images, mix_weight = _mix(augmentation, pixels, keys, scale)
    else:
        with jax.named_scope(UNPACK):
            images = unpack_pixels(pixels, scale)
    if augmentation.erasing:
        with jax.named_scope(AUGMENT):
            words = draw_words(keys, Purpose.ERASING, BLOCKS_OF_ERASING)
            images = erase(images, draw_erased(words, height, width, augmentation.erasing))
    return images, mix_weight


def make_targets(
    labels: Int32[Array, "b"], mix_weight: Int32[Array, "b"] | None, num_classes: int
) -> Float32[Array, "b {num_classes}"]:
    """Convert labels to targets, mixed as `augment_images` mixed the images.

    Rows sum to 1. A label outside 0 … K - 1 makes its row NaN, and so the loss; if images are mixed,
    also the row of its partner.
    """
    targets = one_hot_or_nan(labels, num_classes)
    return targets if mix_weight is None else mix_targets(targets, mix_weight)


@jax.named_scope(UNPACK)
def prepare_for_evaluation(
    augmentation: Augmentation,
    pixels: UInt32[Array, "b H W"],
    scale: PixelScale,
    extents: Int32[Array, "b"] | None = None,
) -> Float32[Array, "b h w 3"]:
    """Crop the centre of packed images to the size of the settings, and normalise them.

    Args:
        augmentation: the settings; only `size` and `whole` are used.
        pixels, scale, extents: as for `augment_images`.

    Raises:
        ValueError: if the crop is larger than the image.
    """
    if augmentation.whole is not None:
        pixels = _crop_pictures(augmentation, augmentation.whole, pixels, extents, None)
    elif augmentation.size is not None:
        pixels = centre_crop(pixels, (augmentation.size, augmentation.size))
    return unpack_pixels(pixels, scale)


def one_hot_or_nan(labels: Int32[Array, "b"], num_classes: int) -> Float32[Array, "b {num_classes}"]:
    """Convert labels to one-hot targets; an out-of-range label gives NaN, and thus a NaN loss."""
    one_hot = jax.nn.one_hot(labels, num_classes, dtype=jnp.float32)
    is_class = (labels >= 0) & (labels < num_classes)
    return jnp.where(is_class[:, None], one_hot, jnp.nan)


def _crop_pictures(
    augmentation: Augmentation,
    whole: Whole,
    pixels: UInt32[Array, "b H W"],
    extents: Int32[Array, "b"] | None,
    keys: Key[Array, "b"] | None,
) -> UInt32[Array, "b h w"]:
    """Crop whole pictures as the settings state, or at the centre without keys."""
    assert extents is not None
    places = read_extents(extents)
    if keys is None or augmentation.crop == "centre":
        boxes = square_boxes(places, whole)
    elif augmentation.crop == "random":
        boxes = square_boxes(places, whole, draw_words(keys, Purpose.CROP)[:, 0])
    else:
        words = draw_words(keys, Purpose.CROP, BLOCKS_OF_BOX)
        ranges = augmentation.area_range, augmentation.ratio_range
        boxes = draw_crop_boxes(words, places.height, places.width, *ranges)
    return crop_pictures(pixels, places, boxes, augmentation.output_shape(*pixels.shape[1:])[0])


def _crop(
    augmentation: Augmentation,
    pixels: UInt32[Array, "b H W"],
    extents: Int32[Array, "b"] | None,
    keys: Key[Array, "b"],
) -> UInt32[Array, "b h w"]:
    if augmentation.whole is not None:
        return _crop_pictures(augmentation, augmentation.whole, pixels, extents, keys)
    height, width = pixels.shape[1:]
    if augmentation.crop == "resized":
        words = draw_words(keys, Purpose.CROP, BLOCKS_OF_BOX)
        boxes = draw_crop_boxes(words, height, width, augmentation.area_range, augmentation.ratio_range)
        return resize_boxes(pixels, boxes, augmentation.output_shape(height, width))
    shape = augmentation.crop_shape(height, width)
    if augmentation.crop == "random":
        words = draw_words(keys, Purpose.CROP)[:, 0]
        pixels = random_crop(pixels, words, shape, augmentation.crop_padding, augmentation.padding_mode)
    else:
        pixels = centre_crop(pixels, shape)
    if augmentation.resized_to is None:
        return pixels
    zeros, ones = jnp.zeros(len(pixels), jnp.int32), jnp.ones(len(pixels), jnp.int32)
    return resize_boxes(pixels, Boxes(zeros, zeros, shape[0] * ones, shape[1] * ones), (augmentation.resized_to,) * 2)


def jitter_colours(
    augmentation: Augmentation, pixels: UInt32[Array, "b H W"], keys: Key[Array, "b"]
) -> UInt32[Array, "b H W"]:
    """Jitter brightness, contrast, saturation and hue of packed pixels, in this order, omitting those of strength 0."""
    strengths = (
        (Purpose.BRIGHTNESS, augmentation.brightness, change_brightness),
        (Purpose.CONTRAST, augmentation.contrast, change_contrast),
        (Purpose.SATURATION, augmentation.saturation, change_saturation),
    )
    if not augmentation.hue and not any(strength for _, strength, _ in strengths):
        return pixels
    planes = split_planes(pixels)
    for purpose, strength, change in strengths:
        if strength:
            planes = change(planes, draw_factors(draw_words(keys, purpose)[:, 0, 0], strength))
    if augmentation.hue:
        planes = turn_hue(planes, draw_turns(draw_words(keys, Purpose.HUE)[:, 0, 0], augmentation.hue))
    return join_planes(planes)


def _mix(
    augmentation: Augmentation, pixels: UInt32[Array, "b H W"], keys: Key[Array, "b"], scale: PixelScale
) -> tuple[Float32[Array, "b H W 3"], Int32[Array, "b"]]:
    mixture = draw_mixture(
        keys,
        *pixels.shape[1:],
        mixup_alpha=augmentation.mixup_alpha,
        cutmix_alpha=augmentation.cutmix_alpha,
    )
    if augmentation.cutmix_alpha:
        pixels = paste_partners(pixels, mixture.box)
    if not augmentation.mixup_alpha:
        return unpack_pixels(pixels, scale), mixture.own_target
    levels = mix_levels(jnp.stack(split_planes(pixels), axis=-1), mixture.own_level)
    return normalise_levels(levels, scale), mixture.own_target


def draw_erased(
    words: UInt32[Array, "b BLOCKS_OF_ERASING 2"], height: int, width: int, probability: float
) -> Bool[Array, "b {height} {width}"]:
    """Draw the mask of erased pixels from uniform words.

    A rectangle is smaller than the image in both directions; if none of ten sizes fits, nothing is erased.
    """
    boxes, found = draw_boxes(words[:, 1:], BoxRule(AREA_RANGE, RATIO_RANGE, (height - 1, width - 1)), height, width)
    happens = found & to_choice(words[:, 0, 0], probability)
    return happens[:, None, None] & mask_boxes(boxes, height, width)


def erase(images: Float32[Array, "b H W 3"], erased: Bool[Array, "b H W"]) -> Float32[Array, "b H W 3"]:
    """Set images to 0 where `erased` is True."""
    return jnp.where(erased[..., None], 0, images)


def apply_user_augmentation(
    augment: UserAugmentation, images: Float32[Array, "B H W 3"], keys: Key[Array, "B"]
) -> Float32[Array, "B H W 3"]:
    """Apply a user-defined augmentation to a batch; called while tracing.

    Args:
        augment: the function.
        images: normalised.
        keys: keys of the images, from `loopfeed.engine.images.positions.image_keys`.

    Raises:
        ValueError: if the function returns anything but images of the same shape and dtype.
    """
    with traced("augment"):
        found: Any = augment(images, key_of_purpose(keys, Purpose.OWN_AUGMENTATION))
    if isinstance(found, jax.Array) and found.shape == images.shape and found.dtype == images.dtype:
        return found
    raise ValueError(
        f"augment must return images of the same shape and dtype, {images.dtype} {list(images.shape)}, but returned "
        f"{describe_given(found)}: change sizes with the setting image_size, and convert with astype(images.dtype)"
    )
