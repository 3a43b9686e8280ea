"""Checks of the buffers and indices that a caller gives to the reader of a split."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.shards.location import ShardError


def check_buffer(split: str, name: str, buffer: NDArray[Any], dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    """Raise ShardError, which names the split and the buffer, unless a buffer can be filled as it is."""
    # An unaligned buffer would be copied, and the copy filled instead.
    if buffer.shape != shape or buffer.dtype != dtype or not (buffer.flags.writeable and buffer.flags.aligned):
        raise ShardError(
            f"{split}: {name} must be a writeable, aligned {np.dtype(dtype).name} {list(shape)}, "
            f"got {_described(buffer)}; allocate it with the split's height and row_words"
        )


def check_indices(split: str, indices: NDArray[np.int64], num_images: int) -> None:
    """Raise ShardError, which names the split, unless indices are int64 ``[b]`` of its ``num_images`` images."""
    if indices.ndim != 1 or indices.dtype != np.int64:
        raise ShardError(f"{split}: indices must be int64 [b], got {indices.dtype} {list(indices.shape)}")
    if len(indices) and (indices.min() < 0 or indices.max() >= num_images):
        bad = indices.min() if indices.min() < 0 else indices.max()
        raise ShardError(f"{split}: image {bad} is outside 0..{num_images - 1}; give indices of images in this split")


def _described(buffer: NDArray[np.generic]) -> str:
    lacks = [name for name in ("writeable", "aligned") if not getattr(buffer.flags, name)]
    return f"{buffer.dtype} {list(buffer.shape)}" + "".join(f", not {name}" for name in lacks)
