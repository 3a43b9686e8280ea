"""The limit of an image's size, and the size to which images are resized if nothing else is asked for.

Imports next to nothing, so that the help of a command responds immediately.
"""

from loopfeed.preprocess.claimed_size import MAX_SIDE

MAX_SIZE = MAX_SIDE
DEFAULT_SIZE = 224
AUTO = "auto"
"""The size that is chosen by the images."""
SIZE_STEP = 4
"""Chosen sizes are multiples of it, as the dense layout needs."""

# Data sets whose images are this small (MNIST 28, CIFAR 32, Tiny ImageNet 64) have no margin to crop away: resizing 32
# to 37 pixels and cropping back to 32 would blur them and cut off their edges.
LARGEST_SIZE_WITHOUT_MARGIN = 64


def default_resize(size: int) -> int:
    """Return the length of the shorter side before the crop, in pixels, for a crop with a side of ``size`` pixels.

    This is 8/7 of ``size``, at most 4096; for a ``size`` of up to 64 it is ``size`` itself.
    """
    return size if size <= LARGEST_SIZE_WITHOUT_MARGIN else min(MAX_SIZE, round(size * 256 / 224))


def fitting_size(shorter_side: int, resize: int | None = None, *, are_squares: bool = False) -> tuple[int, int]:
    """Return the largest size, at most 224, for which an image is not enlarged, and the length to which it is resized.

    It is a multiple of 4, unless the image is smaller than that. Squares of one size have been cut by whoever made the
    set, so that those of 65 to 255 px are not resized: their pixels are kept, those of up to 227 px to the last three.

    Args:
        shorter_side: of the image, in pixels.
        are_squares: whether all images are squares of this side.
        resize: the length of the shorter side before the crop; None is that of `default_resize`.
    """
    if are_squares and resize is None and LARGEST_SIZE_WITHOUT_MARGIN < shorter_side < default_resize(DEFAULT_SIZE):
        return min(DEFAULT_SIZE, shorter_side - shorter_side % SIZE_STEP), shorter_side

    def fits(size: int) -> bool:
        return default_resize(size) <= shorter_side if resize is None else size <= min(shorter_side, resize)

    size = next(filter(fits, range(DEFAULT_SIZE, 0, -SIZE_STEP)), min(shorter_side, resize or shorter_side))
    return size, default_resize(size) if resize is None else resize
