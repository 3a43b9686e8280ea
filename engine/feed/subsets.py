"""The part of a split that the epochs of training draw from, as the user gives it: `train(config, indices=…)`.

Owns what the user may give, and the checks of it. Does not know pixels, labels or orders.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.given_values import describe_given
from loopfeed.preprocess.quantities import quantity

type Indices = Any | Callable[[int], Any]
"""Indices of images of the training split, integers [n], or a function from the epoch (from 0) to them."""

# The batches that are read ahead may be of several epochs.
_KEPT_EPOCHS = 8


class Subsets:
    """The indices that a user gives, checked.

    Args:
        indices: as `Indices`.
        num_images: N of the split.
        where: the name of the split in messages.

    Attributes:
        num_drawn: n, the number of draws of an epoch.
        changes: whether each epoch has indices of its own.
        digest: SHA-256 of the indices of epoch 0, hexadecimal.

    Raises:
        ValueError: the indices are no integers [n], there are none, or one is not in the split.
    """

    def __init__(self, indices: Indices, num_images: int, where: str) -> None:
        self._num_images, self._where = num_images, where
        self.changes = callable(indices)
        self._function: Callable[[int], Any] = indices if callable(indices) else lambda _: indices
        self._lock, self._kept = threading.Lock(), OrderedDict[int, NDArray[np.int32]]()
        first = self.of_epoch(0)
        self.num_drawn = len(first)
        self.digest = hashlib.sha256(first.astype("<i8").tobytes()).hexdigest()

    def of_epoch(self, epoch: int) -> NDArray[np.int32]:
        """Return the indices of an epoch, int32 [n]; the user's function is called from one thread at a time.

        Raises:
            ValueError: as the constructor, or another epoch had another number of them.
        """
        number = epoch if self.changes else 0
        with self._lock:
            if (found := self._kept.get(number)) is None:
                found = self._kept[number] = self._checked(self._function(number), number)
                while len(self._kept) > _KEPT_EPOCHS:
                    self._kept.popitem(last=False)
        return found

    def _checked(self, given: Any, epoch: int) -> NDArray[np.int32]:
        what = f"the indices of epoch {epoch}" if self.changes else "the indices"
        array = np.asarray(given) if isinstance(given, (list, tuple, range)) or hasattr(given, "__array__") else None
        if array is None or array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
            is_mask = array is not None and array.dtype.kind == "b"
            are_names = array is not None and array.dtype.kind in "UST"
            found = f"{describe_given(given)} of text" if are_names else describe_given(given)
            remedy = "give numpy.flatnonzero(mask)" if is_mask else "give the numbers of the images, from 0"
            if are_names:
                remedy = "give the numbers of the images with these names, which loopfeed.open_split(…).names(…) lists"
            raise ValueError(f"{what} must be integers [n] of at least one image, got {found}: {remedy}")
        if array.min() < 0 or array.max() >= self._num_images:
            bad = array.min() if array.min() < 0 else array.max()
            raise ValueError(
                f"{what} must lie in 0 … {self._num_images - 1:,}, the images of {self._where}, got {bad}: correct them"
            )
        if epoch and len(array) != self.num_drawn:
            raise ValueError(
                f"{what} must be as many as those of epoch 0, {self.num_drawn:,}, got {len(array):,}: repeat some, or "
                f"leave some out, because {quantity(self.num_drawn, 'draw')} are an epoch"
            )
        return array.astype(np.int32)
