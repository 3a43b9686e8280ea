"""Batches of a packed split in the windowed order, which a store with a long latency can deliver fast."""

from loopfeed.engine.feed.batches import Labels, Pixels
from loopfeed.engine.feed.shard_batches import label_form_of_split, weighted
from loopfeed.engine.feed.window_reader import NUM_WINDOWS, WindowReader, stored_bytes
from loopfeed.engine.feed.windowed_order import WindowedOrder
from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.reader import ShardSplit

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
        self.read_meter = split.meter
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
