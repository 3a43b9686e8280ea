"""The augmentation pipeline on the device, between the infeed and the network.

Every random draw is a function of (seed, position), see `loopfeed.engine.images.positions`; the host sends the same
packed words whatever the settings. Up to the normalisation all arithmetic on pixels is exact, so that batch size,
sharding and kernels do not change a single bit. Does not depend on the loop.

Moving packed words is exact and causes a third of the memory traffic of floats. On a CPU, one dynamic slice per image
was the fastest of six implementations inside `while_loop`. For 128 images of 32 px, padded by 4 and flipped, it took
1.5 times as long as unpacking alone; a `lax.map` took 2.3 times, gathers of rows and columns 5 to 10 times, and sums
of masked shifts 15 times. With the random draws it took 0.09 ms per batch, against 0.04 ms for unpacking alone.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Key, UInt32

from loopfeed.engine.given_values import describe_given
from loopfeed.engine.images.auto_augment import auto_augment
from loopfeed.engine.images.boxes import BLOCKS_OF_BOX, Boxes, BoxRule, draw_boxes, mask_boxes
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
from loopfeed.engine.images.positions import (
    Positions,
    Purpose,
    draw_words,
    image_keys,
    key_of_purpose,
    to_choice,
    to_index,
)
from loopfeed.engine.images.settings import Augmentation, PaddingName
from loopfeed.engine.images.unpack import PixelScale, normalise_levels, unpack_pixels
from loopfeed.engine.scopes import AUGMENT, UNPACK

_SHIFTS = (24, 16, 8)


def centre_crop(pixels: UInt32[Array, "b H W"], shape: tuple[int, int]) -> UInt32[Array, "b {shape[0]} {shape[1]}"]:
    """Crop the centre of images to `shape` (height, width).

    The offset is round((H - height) / 2), rounding half to even, as in torchvision's CenterCrop and as in packing.

    Raises:
        ValueError: if the crop is larger than the image.
    """
    stored = pixels.shape[1:]
    if shape[0] > stored[0] or shape[1] > stored[1]:
        raise ValueError(
            f"a centre crop must fit into the stored image, got {shape[0]}×{shape[1]} px out of "
            f"{stored[0]}×{stored[1]} px: choose a smaller size, or store larger images"
        )
    top, left = (round((length - size) / 2) for length, size in zip(stored, shape, strict=True))
    return pixels[:, top : top + shape[0], left : left + shape[1]]


def random_crop(
    pixels: UInt32[Array, "b H W"],
    words: UInt32[Array, "b 2"],
    shape: tuple[int, int],
    padding: int,
    mode: PaddingName,
) -> UInt32[Array, "b {shape[0]} {shape[1]}"]:
    """Pad each image and crop it to `shape` (height, width) at a uniformly random place.

    Args:
        words: uniform, for the row and the column.
        shape: at most (H + 2 · padding, W + 2 · padding).
        padding: pixels added on every side.
        mode: "zeros" pads with black, as in torchvision's RandomCrop; "reflect" mirrors at the border pixels.
    """
    if padding:
        around = ((0, 0), (padding, padding), (padding, padding))
        pixels = jnp.pad(pixels, around, mode="constant" if mode == "zeros" else "reflect")
    tops = to_index(words[:, 0], pixels.shape[1] - shape[0] + 1)
    lefts = to_index(words[:, 1], pixels.shape[2] - shape[1] + 1)
    return jax.vmap(lambda image, top, left: lax.dynamic_slice(image, (top, left), shape))(pixels, tops, lefts)


def draw_crop_boxes(
    words: UInt32[Array, "b BLOCKS_OF_BOX 2"],
    height: int,
    width: int,
    area_range: tuple[float, float],
    ratio_range: tuple[float, float],
) -> Boxes:
    """Draw the box of each image for a resized crop, as torchvision's RandomResizedCrop does.

    Args:
        words: uniform.
        height, width: size of the images, in pixels.
        area_range, ratio_range: see `loopfeed.engine.images.settings.Augmentation`.

    Returns:
        The boxes; if none of ten sizes fits, the largest central box whose aspect ratio is in the range.
    """
    assert words.shape[1] == BLOCKS_OF_BOX
    drawn, found = draw_boxes(words, BoxRule(area_range, ratio_range, (height, width)), height, width)
    fallback_height, fallback_width = height, width
    if width / height < ratio_range[0]:
        fallback_height = max(1, round(width / ratio_range[0]))
    elif width / height > ratio_range[1]:
        fallback_width = max(1, round(height * ratio_range[1]))
    fallback = ((height - fallback_height) // 2, (width - fallback_width) // 2, fallback_height, fallback_width)
    return Boxes(*(jnp.where(found, value, other) for value, other in zip(drawn, fallback, strict=True)))


def flip_horizontally(pixels: UInt32[Array, "b H W"], flips: Bool[Array, "b"]) -> UInt32[Array, "b H W"]:
    """Mirror images left to right where `flips` is True."""
    return jnp.where(flips[:, None, None], pixels[:, :, ::-1], pixels)


# The filter is the antialiased triangle of Pillow's BILINEAR and torchvision's antialias=True. Its weights are
# multiples of 2**-16 and levels are integers below 2**8, rounded after each of the two passes as Pillow does: every
# product and every partial sum is then exact in float32, so that order of summation, kernel and batch size do not
# change a bit. A gather of only the pixels with a nonzero weight would do less arithmetic, but XLA's gathers are slow
# on CPU and TPU; the matrix products cost under 1 % of a ResNet-50 step at 224 px.
def resize_boxes(
    pixels: UInt32[Array, "b H W"], boxes: Boxes, shape: tuple[int, int]
) -> UInt32[Array, "b {shape[0]} {shape[1]}"]:
    """Resize one box of each image as if the box had been cropped first, so that pixels outside it have no effect.

    Args:
        pixels: packed; H and W at most 16384.
        boxes: within the images, at least one pixel each.
        shape: (height, width) of the results.

    Returns:
        Packed pixels, low byte 0: Pillow's crop and resize, except for single levels where the rounding of the weights
        decides a tie.
    """
    height, width = shape
    across = triangle_weights(boxes.left, boxes.width, pixels.shape[2], width)
    down = triangle_weights(boxes.top, boxes.height, pixels.shape[1], height)
    shifts = jnp.array(_SHIFTS, jnp.uint32)[:, None]
    levels = ((pixels[:, :, None, :] >> shifts) & 0xFF).astype(jnp.float32)
    # Horizontally first, like Pillow. Without HIGHEST a GPU rounds the factors to 11 bits and a TPU to 8.
    levels = _to_levels(jnp.einsum("bhcw,bjw->bhcj", levels, across, precision=lax.Precision.HIGHEST))
    levels = _to_levels(jnp.einsum("bih,bhcj->bicj", down, levels, precision=lax.Precision.HIGHEST))
    words = levels.astype(jnp.uint32) << shifts
    return words[:, :, 0] | words[:, :, 1] | words[:, :, 2]


def triangle_weights(
    start: Int32[Array, "b"], length: Int32[Array, "b"], source: int, target: int
) -> Float32[Array, "b {target} {source}"]:
    """Return matrices that resize `length` pixels, beginning at `start`, to `target` pixels.

    The centre of pixel i of the result is at (i + 1/2) · length / target in the box; the weight of a pixel falls
    linearly to 0 at a distance of max(1, length / target). Multiplied by 2 · target, all of these are integers.

    Args:
        start, length: within 0 … source.
        source: length of the image's side in pixels.
        target: length of the result's side in pixels.

    Returns:
        Multiples of 2**-16; a row sums to 1 within 2**-17 per pixel with a weight.
    """
    centres = (2 * jnp.arange(target, dtype=jnp.int32) + 1)[:, None] * length[:, None, None]
    inside = jnp.arange(source, dtype=jnp.int32) - start[:, None, None]
    distances = jnp.abs((2 * inside + 1) * target - centres)
    reach = 2 * jnp.maximum(target, length)[:, None, None]
    heights = jnp.where((inside >= 0) & (inside < length[:, None, None]), jnp.maximum(reach - distances, 0), 0)
    totals = heights.sum(axis=2, keepdims=True)
    # A quotient of integers, scaled exactly, so that a compiler has no operations to fuse differently.
    shares = heights.astype(jnp.float32) / totals.astype(jnp.float32)
    return jnp.floor(shares * 2**16 + 0.5) * jnp.float32(2**-16)


def _to_levels(sums: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Round to integer levels, capped at 255 because the weights of many pixels can sum to slightly more than 1."""
    return jnp.minimum(jnp.floor(sums + 0.5), 255)


type UserAugmentation = Callable[[Float32[Array, "B H W 3"], Key[Array, "B"]], Float32[Array, "B H W 3"]]
"""(normalised images, one PRNG key per image) → images."""


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
    found: Any = augment(images, key_of_purpose(keys, Purpose.OWN_AUGMENTATION))
    if isinstance(found, jax.Array) and found.shape == images.shape and found.dtype == images.dtype:
        return found
    raise ValueError(
        f"augment must return images of the same shape and dtype, {images.dtype} {list(images.shape)}, but returned "
        f"{describe_given(found)}: change sizes with the setting image_size, and convert with astype(images.dtype)"
    )


# Zhong et al. (2020), arXiv:1708.04896, and torchvision's RandomErasing.
AREA_RANGE = (0.02, 0.33)
RATIO_RANGE = (1 / 3.3, 1 / 0.3)
"""Range of width / height; torchvision draws height / width in 0.3 … 3.3."""

BLOCKS_OF_ERASING = 1 + BLOCKS_OF_BOX


def augment_images(
    augmentation: Augmentation,
    pixels: UInt32[Array, "b H W"],
    positions: Positions,
    seed_words: UInt32[Array, "2"],
    scale: PixelScale,
) -> tuple[Float32[Array, "b h w 3"], Int32[Array, "b"] | None]:
    """Augment and normalise one device's part of a batch, b images; called while tracing.

    Args:
        augmentation: the settings, static.
        pixels: packed.
        positions: positions of the images, see `loopfeed.engine.images.positions`. If images are mixed, the first must
            be even, as it is if every device takes the same even number of images.
        seed_words: the seed's high and low half.
        scale: mean and standard deviation of the pixels.

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
        pixels = _crop(augmentation, pixels, keys)
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
    pixels: UInt32[Array, "b H W"], size: int | None, scale: PixelScale
) -> Float32[Array, "b h w 3"]:
    """Crop the centre of packed images to `size` × `size` pixels (None: the whole image), and normalise them.

    Raises:
        ValueError: if the crop is larger than the image.
    """
    return unpack_pixels(pixels if size is None else centre_crop(pixels, (size, size)), scale)


def one_hot_or_nan(labels: Int32[Array, "b"], num_classes: int) -> Float32[Array, "b {num_classes}"]:
    """Convert labels to one-hot targets; an out-of-range label gives NaN, and thus a NaN loss."""
    one_hot = jax.nn.one_hot(labels, num_classes, dtype=jnp.float32)
    is_class = (labels >= 0) & (labels < num_classes)
    return jnp.where(is_class[:, None], one_hot, jnp.nan)


def _crop(augmentation: Augmentation, pixels: UInt32[Array, "b H W"], keys: Key[Array, "b"]) -> UInt32[Array, "b h w"]:
    height, width = pixels.shape[1:]
    shape = augmentation.output_shape(height, width)
    if augmentation.crop == "random":
        words = draw_words(keys, Purpose.CROP)[:, 0]
        return random_crop(pixels, words, shape, augmentation.crop_padding, augmentation.padding_mode)
    if augmentation.crop == "resized":
        words = draw_words(keys, Purpose.CROP, BLOCKS_OF_BOX)
        boxes = draw_crop_boxes(words, height, width, augmentation.area_range, augmentation.ratio_range)
        return resize_boxes(pixels, boxes, shape)
    return centre_crop(pixels, shape)


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
