"""The limit of an image's size, and the size to which images are resized if nothing else is asked for.

Imports next to nothing, so that the help of a command responds immediately.
"""

from loopfeed.preprocess.claimed_size import MAX_SIDE

MAX_SIZE = MAX_SIDE

# Data sets whose images are this small (MNIST 28, CIFAR 32, Tiny ImageNet 64) have no margin to crop away: resizing 32
# to 37 pixels and cropping back to 32 would blur them and cut off their edges.
LARGEST_SIZE_WITHOUT_MARGIN = 64


def default_resize(size: int) -> int:
    """Return the length of the shorter side before the crop, in pixels, for a crop with a side of ``size`` pixels.

    This is 8/7 of ``size``, at most 4096; for a ``size`` of up to 64 it is ``size`` itself.
    """
    return size if size <= LARGEST_SIZE_WITHOUT_MARGIN else min(MAX_SIZE, round(size * 256 / 224))
