"""Compares the size that a file claims with what is stored, before memory is taken for it.

Compression, fill values and holes let a small file stand for large arrays, but hardly ever more than this many times.
"""

import os

MAX_SIDE = 4096
"""The largest side of a stored image, in pixels."""
MOST_RATIO = 256
"""The largest ratio of numbers in memory to bytes in files: LZ4 reaches 255; a state of zeros is mostly weights."""
FREE_BYTES = 1 << 28
"""A claim of so many bytes more is never refused."""


def stored_size(status: os.stat_result) -> int:
    """Return how many bytes of a file are stored: its size without holes, as far as the file system says."""
    blocks = getattr(status, "st_blocks", 0)
    # Some file systems count no blocks, or one until they have written a new file.
    return min(status.st_size, 512 * blocks) if blocks > 1 else status.st_size


def least_stored_bytes(claimed_bytes: int) -> int:
    """Return how many bytes must be stored for numbers of `claimed_bytes`."""
    return max(0, -(-(claimed_bytes - FREE_BYTES) // MOST_RATIO))


def is_plausible(claimed_bytes: int, stored_bytes: int) -> bool:
    """Return whether files of `stored_bytes` may stand for numbers of `claimed_bytes`."""
    return stored_bytes >= least_stored_bytes(claimed_bytes)
