"""Windows over an axis: how often a convolution multiplies."""

from functools import lru_cache


@lru_cache(maxsize=1024)
def count_meetings(
    size: int, window: int, num_results: int, stride: int, low: int, dilated: int = 1, spread: int = 1
) -> int:
    """Return how often an element of a window meets a number of the input, along one axis.

    Args:
        size: numbers of the input.
        window: elements of the window.
        num_results: positions of the window.
        stride: step between them.
        low: padding before the first number.
        dilated: distance of the numbers of the input.
        spread: distance of the elements of the window.
    """
    last = (size - 1) * dilated
    positions = (at * stride + tap * spread - low for at in range(num_results) for tap in range(window))
    return sum(1 for position in positions if 0 <= position <= last and position % dilated == 0)
