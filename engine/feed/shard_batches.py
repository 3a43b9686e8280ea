"""Batch sources that read a packed split: shuffled for training, in order for evaluation."""

import numpy as np
from numpy.typing import NDArray

from engine.feed.batches import PADDING_LABEL, Labels, Lent, Pixels
from engine.feed.order import EpochOrder
from preprocess.shards.reader import ShardSplit

_POSITIONS_AT_ONCE = 2048


class ShardBatches:
    """Batches of a packed split, shuffled with `seed`; every epoch contains every image once."""

    thread_safe = True

    def __init__(self, split: ShardSplit, *, batch: int, seed: int) -> None:
        self._split = split
        self._order = EpochOrder(split.num_images, seed)
        self.batch, self.height, self.width = batch, split.height, split.width
        self.row_words = split.row_words
        # The index of a batch, and the images of that batch and the following batches; always replaced together.
        self._ordered = 0, np.empty((0, batch), np.int64)

    def fill(self, batch_index: int, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Read the batch's images from the shards; raise preprocess.shards.reader.ShardError if that fails."""
        self._split.read_into(self._images_of(batch_index), pixels, labels, timeout_s=timeout_s)

    def lend(self, batch_index: int, labels: Labels, *, timeout_s: float) -> Lent | None:
        """Lend the batch's images from mapped shard files; see `LendingSource`."""
        if not self._split.lends:
            return None
        return self._split.lend(self._images_of(batch_index), labels, timeout_s=timeout_s)

    def check_unchanged(self) -> None:
        """Raise preprocess.shards.reader.ShardError if the files were changed; see `CheckedSource`."""
        self._split.check_unchanged()

    def _images_of(self, batch_index: int) -> NDArray[np.int64]:
        """Return a batch's image indices, computed 2048 at a time, which takes as long as a few hundred (90 µs)."""
        first, images = self._ordered
        if not first <= batch_index < first + len(images):
            num_batches = max(1, _POSITIONS_AT_ONCE // self.batch)
            group = batch_index // num_batches
            images = self._order.batch(group, num_batches * self.batch).reshape(num_batches, self.batch)
            first = group * num_batches
            self._ordered = first, images
        return images[batch_index - first]


class SequentialBatches:
    """Batches of a packed split in stored order, repeated endlessly."""

    thread_safe = True

    def __init__(self, split: ShardSplit, *, batch: int) -> None:
        self._split = split
        self.batch, self.height, self.width = batch, split.height, split.width
        self.row_words = split.row_words
        self.num_batches = -(-split.num_images // batch)

    def fill(self, batch_index: int, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Read the batch's images; padding rows of the last batch are black and have the label PADDING_LABEL."""
        start = batch_index % self.num_batches * self.batch
        count = min(self.batch, self._split.num_images - start)
        images = np.arange(start, start + count, dtype=np.int64)
        self._split.read_into(images, pixels[:count], labels[:count], timeout_s=timeout_s)
        pixels[count:], labels[count:] = 0, PADDING_LABEL

    def check_unchanged(self) -> None:
        """Raise preprocess.shards.reader.ShardError if the files were changed; see `CheckedSource`."""
        self._split.check_unchanged()
