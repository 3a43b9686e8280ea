"""Batch sources that read a packed split: shuffled for training, in order for evaluation."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.feed.batches import PADDING_LABEL, Labels, Lent, Pixels
from loopfeed.engine.feed.draws import ImageOrder
from loopfeed.engine.feed.order import EpochOrder, WindowedOrder
from loopfeed.engine.feed.resizable_batches import ResizableBatches
from loopfeed.engine.feed.window_reader import NUM_WINDOWS, WindowReader, stored_bytes
from loopfeed.engine.settings import SettingError
from loopfeed.engine.stages import StageRanges
from loopfeed.preprocess.extents import Extent
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.reader import ShardSplit

if TYPE_CHECKING:
    from loopfeed.engine.feed.label_form import LabelForm

_POSITIONS_AT_ONCE = 2048
# A permutation has a fixed cost for each epoch: 2048 positions of 20 images took 50 ms.
_EPOCHS_AT_ONCE = 2


class ShardBatches(ResizableBatches):
    """Batches of a packed split, shuffled with `seed`; every epoch contains every image once.

    Args:
        split: the split.
        batch: images per batch.
        seed: seed of the order.
        order: another order of the images, which has a seed of its own; None for that of the seed.

    Attributes:
        split: the split.
        label_form: the form of the labels, float32 [K] targets; None for class numbers.
    """

    thread_safe = True

    def __init__(self, split: ShardSplit, *, batch: int, seed: int, order: ImageOrder | None = None) -> None:
        self.split, self._ranges = split, StageRanges.of([0], [batch])
        self._order: ImageOrder = EpochOrder(split.num_images, seed) if order is None else order
        self.batch, self.height, self.width = batch, split.height, split.width
        self.row_words, self.label_form = split.row_words, label_form_of_split(split)
        self.whole, self.read_meter = split.manifest.whole, split.meter
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

    def images_of(self, batch_index: int) -> NDArray[np.int64]:
        """Return the indices in the split of a batch's images, int64 [B]."""
        return self._images_of(batch_index)

    def _images_of(self, batch_index: int) -> NDArray[np.int64]:
        """Return a batch's image indices, computed 2048 at a time, which takes as long as a few hundred (90 µs).

        Of a small split, they are computed for a few epochs at a time.

        Of an order by epoch, they are computed batch by batch: a user's function knows no epochs that never come.
        """
        first, images = self._ordered
        if not first <= batch_index < first + len(images):
            span = self._ranges[self._ranges.stage_of(batch_index)]
            most = min(_POSITIONS_AT_ONCE, _EPOCHS_AT_ONCE * self.split.num_images)
            num_batches = 1 if self._order.is_by_epoch else max(1, most // span.size)
            first = batch_index - (batch_index - span.first) % num_batches
            if span is not self._ranges[-1]:
                num_batches = min(num_batches, span.stop - first)
            start = span.image_at(first)
            positions = np.arange(start, start + num_batches * span.size, dtype=np.int64)
            images = self._order.images_at(positions).reshape(num_batches, span.size)
            self._ordered = first, images
        return images[batch_index - first]


class SequentialBatches:
    """Batches of a packed split in stored order, repeated endlessly.

    Attributes:
        split: the split.
        num_images: the number of images that are read.
        label_form: the form of the labels, float32 [K] targets; None for class numbers.

    Args:
        split: the split.
        batch: images per batch.
        label_of: the label to return for each class of the split, int32 [K]; None for its own labels.
        images: the images to read in their order, int64 [n]; None for all.
    """

    thread_safe = True

    def __init__(
        self,
        split: ShardSplit,
        *,
        batch: int,
        label_of: NDArray[np.int32] | None = None,
        images: NDArray[np.int64] | None = None,
    ) -> None:
        self.split, self._label_of, self._images = split, label_of, images
        self.num_images = split.num_images if images is None else len(images)
        self.batch, self.height, self.width = batch, split.height, split.width
        self.row_words, self.label_form = split.row_words, label_form_of_split(split)
        self.whole, self.read_meter = split.manifest.whole, split.meter
        self.num_batches = -(-self.num_images // batch)

    def fill(self, batch_index: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Read images of the batch; padding rows are black and have the label PADDING_LABEL, or targets of weight 0."""
        start = batch_index % self.num_batches * self.batch + rows.start
        count = max(0, min(len(rows), self.num_images - start))
        pixels[count:], labels[count:] = 0, 0 if self.label_form else PADDING_LABEL
        if self.whole:
            labels[count:, 1 if self.label_form else 0] = Extent(self.height, self.width, is_transposed=False).to_word()
        if not count:
            return
        images = self.images_in(start, start + count)
        words = weighted(labels[:count]) if self.label_form else labels[:count]
        self.split.read_into(images, pixels[:count], words, timeout_s=timeout_s)
        if self._label_of is not None:
            classes = labels[:count, 1] if self.whole else labels[:count]
            classes[:] = self._label_of[classes]

    def images_in(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the indices in the split of the images `start` … `stop` - 1 that are read, int64 [stop - start]."""
        return np.arange(start, stop, dtype=np.int64) if self._images is None else self._images[start:stop]

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
    """Write the weight 1 of each example into its first word, and return the words behind it."""
    from loopfeed.engine.feed.label_form import WEIGHT_WORDS

    labels[:, :WEIGHT_WORDS] = np.ones(1, np.float32).view(np.int32)
    return labels[:, WEIGHT_WORDS:]


# More images would need too much memory for their places in the window.
_MOST_WINDOW_IMAGES = 1 << 20
# The least number of blocks that are mixed in a window.
_LEAST_BLOCKS = 8
_GB = 1e9


class WindowedBatches:
    """Batches of a packed split, shuffled with `seed` within windows; every epoch contains every image once.

    Args:
        split: the split.
        batch: images per batch, over all processes.
        seed: seed of the order.
        window_gb: memory of the windows together, over all processes, in GB.
        pairs: whether the images at the rows 2k and 2k + 1 of a batch are mixed; see `WindowedOrder`.
        rows: the rows of each batch that this process takes; others are read one image at a time.
        first_batch: index of the first batch that is taken.
        num_threads: threads that read a local split.
        timeout_s: time limit for one part of a window, in seconds.

    Attributes:
        label_form: the form of the labels, float32 [K] targets; None for class numbers.
        order: the order of the images.
        held_bytes: memory of the windows of this process, in bytes.

    Raises:
        SettingError: a window would be smaller than a batch.
    """

    thread_safe = True

    def __init__(
        self,
        split: ShardSplit,
        *,
        batch: int,
        seed: int,
        window_gb: float,
        pairs: bool = True,
        rows: range,
        first_batch: int,
        num_threads: int,
        timeout_s: float,
    ) -> None:
        self.split, self._rows = split, rows
        self.batch, self.height, self.width = batch, split.height, split.width
        self.row_words, self.label_form = split.row_words, label_form_of_split(split)
        self.whole, self.read_meter = split.manifest.whole, split.meter
        window_images = _window_images(split, batch, window_gb)
        block_images = max(1, min(split.manifest.shard_images, window_images // _LEAST_BLOCKS))
        self.order = WindowedOrder(split.num_images, seed, batch, block_images, window_images, pairs)
        self._reader = WindowReader(
            split,
            self.order,
            rows=rows,
            first_position=first_batch * batch,
            num_threads=num_threads,
            timeout_s=timeout_s,
        )
        self.held_bytes = self._reader.num_bytes

    def fill(self, batch_index: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Copy images of the batch from their windows; raise ShardError if that fails."""
        if rows.start < self._rows.start or rows.stop > self._rows.stop:
            raise ValueError(f"the windows hold the rows {self._rows} of each batch, got {rows}: ask for these alone")
        words = weighted(labels) if self.label_form else labels
        first, last = (batch_index * self.batch + row for row in (rows.start, rows.stop))
        start = first
        # A window is given back before the next is waited for, which may need its memory.
        while start < last:
            stop = min(last, self.order.bounds(self.order.window_at(start))[1])
            part = slice(start - first, stop - first)
            self._reader.take(start, stop, pixels[part], words[part], timeout_s=timeout_s)
            start = stop

    def check_unchanged(self) -> None:
        """Raise loopfeed.preprocess.shards.reader.ShardError if the files were changed; see `CheckedSource`."""
        self.split.check_unchanged()

    def images_of(self, batch_index: int) -> NDArray[np.int64]:
        """Return the indices in the split of a batch's images, int64 [B]."""
        start = batch_index * self.batch
        return self.order.images_at(np.arange(start, start + self.batch, dtype=np.int64))

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.close()


def _window_images(split: ShardSplit, batch: int, window_gb: float) -> int:
    """Return the largest number of images in a window; raise SettingError if that is less than a batch."""
    image_bytes = NUM_WINDOWS * stored_bytes(split)
    num_images = min(_MOST_WINDOW_IMAGES, round(window_gb * _GB) // image_bytes)
    needed = min(batch, split.num_images)
    if num_images < needed:
        least = -(-needed * image_bytes // 1000) / 1e6
        raise SettingError(
            "window_gb",
            "{setting} must be at least {least:g}, the memory of two windows of {images} each, got {found:g}",
            least=least,
            images=quantity(needed, "image"),
            found=window_gb,
        )
    return num_images
