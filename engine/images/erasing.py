"""Random erasing, which sets a rectangle of the normalised image to 0, the mean colour of the data set."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, UInt32

from loopfeed.engine.images.boxes import BLOCKS_OF_BOX, BoxRule, draw_boxes, mask_boxes
from loopfeed.engine.images.positions import to_choice

# Zhong et al. (2020), arXiv:1708.04896, and torchvision's RandomErasing.
AREA_RANGE = (0.02, 0.33)
RATIO_RANGE = (1 / 3.3, 1 / 0.3)
"""Range of width / height; torchvision draws height / width in 0.3 … 3.3."""

BLOCKS_OF_ERASING = 1 + BLOCKS_OF_BOX


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
