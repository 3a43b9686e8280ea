"""Crops and horizontal flips of packed pixels, and crops that are scaled.

Moving packed words is exact and causes a third of the memory traffic of floats. On a CPU, one dynamic slice per image
was the fastest of six implementations inside `while_loop`. For 128 images of 32 px, padded by 4 and flipped, it took
1.5 times as long as unpacking alone; a `lax.map` took 2.3 times, gathers of rows and columns 5 to 10 times, and sums
of masked shifts 15 times. With the random draws it took 0.09 ms per batch, against 0.04 ms for unpacking alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from loopfeed.engine.images.boxes import BLOCKS_OF_BOX, Boxes, BoxRule, Length, draw_boxes
from loopfeed.engine.images.positions import to_index
from loopfeed.engine.images.settings import PaddingName
from loopfeed.preprocess.extents import LENGTH_BITS, LENGTH_MASK, TRANSPOSED_BIT, Whole

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
    height: Length,
    width: Length,
    area_range: tuple[float, float],
    ratio_range: tuple[float, float],
) -> Boxes:
    """Draw the box of each image for a resized crop, as torchvision's RandomResizedCrop does.

    Args:
        words: uniform.
        height, width: size of the images in pixels.
        area_range, ratio_range: see `loopfeed.engine.images.settings.Augmentation`.

    Returns:
        The boxes; if none of ten sizes fits, the largest central box whose aspect ratio is in the range.
    """
    assert words.shape[1] == BLOCKS_OF_BOX
    drawn, found = draw_boxes(words, BoxRule(area_range, ratio_range, (height, width)), height, width)
    # Of an image that is too narrow, or too wide, the largest box of the ratio that is nearest to its own.
    narrow, wide = width / height < ratio_range[0], width / height > ratio_range[1]
    fallback_height = jnp.where(narrow, _rounded(width / ratio_range[0]), height)
    fallback_width = jnp.where(wide, _rounded(height * ratio_range[1]), width)
    fallback = ((height - fallback_height) // 2, (width - fallback_width) // 2, fallback_height, fallback_width)
    return Boxes(*(jnp.where(found, value, other) for value, other in zip(drawn, fallback, strict=True)))


def _rounded(length: float | Float32[Array, "b"]) -> Length:
    if isinstance(length, float):
        return max(1, round(length))
    return jnp.maximum(1, jnp.round(length).astype(jnp.int32))


class Places(NamedTuple):
    """Where on their canvases whole pictures are.

    Attributes:
        height, width: of the upright pictures, in pixels, at least 1.
        is_transposed: whether a row of the canvas is a column of the upright picture.
    """

    height: Int32[Array, "b"]
    width: Int32[Array, "b"]
    is_transposed: Bool[Array, "b"]


def read_extents(extents: Int32[Array, "b"]) -> Places:
    """Return the places of pictures from their words (`loopfeed.preprocess.extents`)."""
    rows, columns = (jnp.maximum(extents >> shift & LENGTH_MASK, 1) for shift in (LENGTH_BITS, 0))
    is_transposed = extents >> TRANSPOSED_BIT & 1 == 1
    return Places(jnp.where(is_transposed, columns, rows), jnp.where(is_transposed, rows, columns), is_transposed)


def square_boxes(places: Places, whole: Whole, words: UInt32[Array, "b 2"] | None = None) -> Boxes:
    """Return the square of each picture that a `CenterCrop` of a `Resize` keeps, or one like it at a random place.

    Args:
        places: the pictures.
        whole: their geometry.
        words: uniform, for the row and the column; None takes the centre, as torchvision's CenterCrop does.
    """
    size, resize = whole
    short = jnp.minimum(places.height, places.width)
    # Exactly `size` unless the picture was made smaller to fit on its canvas; in integers, halves are rounded up.
    side = jnp.clip((2 * short * size + resize) // (2 * resize), 1, short)
    rooms = places.height - side, places.width - side
    if words is None:
        # Halves to even, as Python rounds.
        top, left = (room // 2 + (room % 4 == 3) for room in rooms)
    else:
        top, left = (to_index(words[:, index], room + 1) for index, room in enumerate(rooms))
    return Boxes(top, left, side, side)


def crop_pictures(
    pixels: UInt32[Array, "b H W"], places: Places, boxes: Boxes, size: int
) -> UInt32[Array, "b {size} {size}"]:
    """Resize one box of each whole picture to `size` × `size` pixels, as `resize_boxes` does.

    Args:
        pixels: canvases, packed.
        places: where the pictures are.
        boxes: in the upright pictures, at least one pixel each.
        size: side of the results.
    """
    turned = places.is_transposed
    pairs = ((boxes.top, boxes.left), (boxes.left, boxes.top), (boxes.height, boxes.width), (boxes.width, boxes.height))
    stored = Boxes(*(jnp.where(turned, other, own) for own, other in pairs))
    squares = resize_boxes(pixels, stored, (size, size))
    return jnp.where(turned[:, None, None], squares.swapaxes(1, 2), squares)


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
