"""Where on its canvas a whole picture is: its height and width, and whether it was transposed, as one word.

The word is what a shard has for each image, and what the device receives beside its pixels. Does not access files, and
imports numpy for types alone: settings, which commands load before they know what to do, name `Whole`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

LENGTH_BITS = 15
"""Bits of a length in pixels."""
TRANSPOSED_BIT = 2 * LENGTH_BITS
LENGTH_MASK = (1 << LENGTH_BITS) - 1


class Whole(NamedTuple):
    """The geometry of a pack of whole pictures.

    Attributes:
        size: side of the square that evaluation crops, in pixels.
        resize: shorter side of a stored picture, in pixels.
    """

    size: int
    resize: int


class Extent(NamedTuple):
    """The place of a picture on its canvas: the rows 0 … height - 1 and the columns 0 … width - 1.

    Attributes:
        height, width: in pixels, as stored, at least 1.
        is_transposed: whether a stored row is a column of the upright picture.
    """

    height: int
    width: int
    is_transposed: bool

    def to_word(self) -> int:
        """Return the extent as a word: the width in bits 0 to 14, the height in bits 15 to 29, then the flag."""
        return self.width | self.height << LENGTH_BITS | self.is_transposed << TRANSPOSED_BIT

    @classmethod
    def from_word(cls, word: int) -> Extent:
        """Create an extent from the result of `to_word`."""
        return cls(word >> LENGTH_BITS & LENGTH_MASK, word & LENGTH_MASK, bool(word >> TRANSPOSED_BIT))


def share_of_square(rule: Mapping[str, object]) -> float | None:
    """Return the share of a 4:3 photograph that central squares keep, None if a resize rule has no margin or a canvas.

    4:3 is the median of ImageNet's photographs: 224 of 256 px keep 57 % of one, and 56 % of 1,000 of them on average.
    """
    size, resize = rule.get("size"), rule.get("resize")
    if "canvas" in rule or not isinstance(size, int) or not isinstance(resize, int) or not 0 < size < resize:
        return None
    return (size / resize) ** 2 * 3 / 4


def upright(image: NDArray[np.uint8], word: int) -> NDArray[np.uint8]:
    """Return the upright picture ``[h, w, 3]`` on a canvas ``[H, W, 3]``."""
    extent = Extent.from_word(word)
    picture = image[: extent.height, : extent.width]
    return picture.swapaxes(0, 1) if extent.is_transposed else picture


def all_upright(images: Sequence[NDArray[np.uint8]], labels: NDArray[np.int32]) -> list[NDArray[np.uint8]]:
    """Return the upright pictures of canvases, whose words are the first of each row of ``labels``."""
    return [upright(image, word) for image, word in zip(images, labels[:, 0].tolist(), strict=True)]


def num_pixels(words: NDArray[np.uint32]) -> int:
    """Return how many pixels the pictures of these words have together."""
    heights, widths = words >> LENGTH_BITS & LENGTH_MASK, words & LENGTH_MASK
    return int((heights.astype("int64") * widths).sum())


def are_outside(words: NDArray[np.uint32], height: int, width: int) -> NDArray[np.bool]:
    """Return for each word whether it is no place on a canvas of ``height`` × ``width`` pixels."""
    heights, widths = words >> LENGTH_BITS & LENGTH_MASK, words & LENGTH_MASK
    is_small = (heights < 1) | (widths < 1)
    return is_small | (heights > height) | (widths > width) | (words >> (TRANSPOSED_BIT + 1) != 0)
