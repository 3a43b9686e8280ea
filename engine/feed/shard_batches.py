"""Batch sources that read a packed split: shuffled for training, in order for evaluation."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.feed.batches import PADDING_LABEL, Labels, Lent, Pixels
from loopfeed.engine.feed.order import EpochOrder
from loopfeed.preprocess.shards.reader import ShardSplit

if TYPE_CHECKING:
    from loopfeed.engine.feed.label_form import LabelForm

_POSITIONS_AT_ONCE = 2048


class ShardBatches:
    """Batches of a packed split, shuffled with `seed`; every epoch contains every image once.

    Attributes:
        split: the split.
        label_form: the form of the labels, float32 [K] targets; None for class numbers.
    """

    thread_safe = True

    def __init__(self, split: ShardSplit, *, batch: int, seed: int) -> None:
        self.split = split
        self._order = EpochOrder(split.num_images, seed)
        self.batch, self.height, self.width = batch, split.height, split.width
        self.row_words, self.label_form = split.row_words, label_form_of_split(split)
        self.read_meter = split.meter
        # The index of a batch, and the images of that batch and the following batches; always replaced together.
        self._ordered = 0, np.empty((0, batch), np.int64)

    def fill(self, batch_index: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Read images of the batch from the shards; raise `loopfeed.ShardError` if that fails."""
        words = weighted(labels) if self.label_form else labels
        images = self._images_of(batch_index)[rows.start : rows.stop]
        self.split.read_into(images, pixels, words, timeout_s=timeout_s)

    def lend(self, batch_index: int, rows: range, labels: Labels, *, timeout_s: float) -> Lent | None:
        """Lend images of the batch from mapped shard files; see `LendingSource`."""
        if not self.split.lends:
            return None
        words = weighted(labels) if self.label_form else labels
        images = self._images_of(batch_index)[rows.start : rows.stop]
        return self.split.lend(images, words, timeout_s=timeout_s)

    def check_unchanged(self) -> None:
        """Raise loopfeed.preprocess.shards.reader.ShardError if the files were changed; see `CheckedSource`."""
        self.split.check_unchanged()

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
    """Batches of a packed split in stored order, repeated endlessly.

    Attributes:
        split: the split.
        label_form: the form of the labels, float32 [K] targets; None for class numbers.

    Args:
        split: the split.
        batch: images per batch.
        label_of: the label to return for each class of the split, int32 [K]; None for its own labels.
    """

    thread_safe = True

    def __init__(self, split: ShardSplit, *, batch: int, label_of: NDArray[np.int32] | None = None) -> None:
        self.split, self._label_of = split, label_of
        self.batch, self.height, self.width = batch, split.height, split.width
        self.row_words, self.label_form = split.row_words, label_form_of_split(split)
        self.read_meter = split.meter
        self.num_batches = -(-split.num_images // batch)

    def fill(self, batch_index: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Read images of the batch; padding rows are black and have the label PADDING_LABEL, or targets of weight 0."""
        start = batch_index % self.num_batches * self.batch + rows.start
        count = max(0, min(len(rows), self.split.num_images - start))
        pixels[count:], labels[count:] = 0, 0 if self.label_form else PADDING_LABEL
        if not count:
            return
        images = np.arange(start, start + count, dtype=np.int64)
        words = weighted(labels[:count]) if self.label_form else labels[:count]
        self.split.read_into(images, pixels[:count], words, timeout_s=timeout_s)
        if self._label_of is not None:
            labels[:count] = self._label_of[labels[:count]]

    def check_unchanged(self) -> None:
        """Raise loopfeed.preprocess.shards.reader.ShardError if the files were changed; see `CheckedSource`."""
        self.split.check_unchanged()


def label_form_of_split(split: ShardSplit) -> "LabelForm | None":
    """Return the form of a split's targets; None if its images have one class each."""
    if not split.target_words:
        return None
    # Here, because it needs jax, which class numbers do not.
    from loopfeed.engine.feed.label_form import LabelForm

    targets = split.manifest.targets
    return LabelForm.of_targets(split.num_classes, are_bits=targets is not None and targets.kind == "classes")


def weighted(labels: Labels) -> Labels:
    """Write the weight 1 of each example into its first word, and return the words of the labels behind it."""
    from loopfeed.engine.feed.label_form import WEIGHT_WORDS

    labels[:, :WEIGHT_WORDS] = np.ones(1, np.float32).view(np.int32)
    return labels[:, WEIGHT_WORDS:]
