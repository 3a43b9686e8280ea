"""Sources whose batches can have another size in each stage of a run: their base, and random pixels."""

import math

import numpy as np

from loopfeed.engine.feed.batches import Labels, Pixels
from loopfeed.engine.stages import StageRanges


class ResizableBatches:
    """A base of sources whose batches can have another size in each stage of a run.

    Attributes:
        batch: images of the largest batch.
    """

    batch: int
    _ranges: StageRanges

    def resize_batches(self, ranges: StageRanges) -> None:
        """Give the batches of each stage their size, before the first batch; the order of the images stays the same."""
        self._ranges, self.batch = ranges, ranges.largest

    def batch_of(self, batch_index: int) -> int:
        """Return the number of images of a batch."""
        return self._ranges[self._ranges.stage_of(batch_index)].size


class SyntheticBatches(ResizableBatches):
    """Random pixels and labels, determined by (seed, batch index), for measuring the loop without a data set."""

    thread_safe = True

    def __init__(self, *, batch: int, height: int, width: int, num_classes: int, seed: int) -> None:
        self.batch, self.height, self.width = batch, height, width
        self._num_classes, self._seed, self._ranges = num_classes, seed, StageRanges.of([0], [batch])

    def fill(self, batch_index: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Draw the whole batch, of which the rows are a part; this never waits, so `timeout_s` is ignored."""
        # Always pass the seed as two words: SeedSequence concatenates the words of its integers and pads them with
        # zeros, so that [2**32, 0] and [0, 1] would otherwise draw the same batch.
        words = [self._seed & 0xFFFFFFFF, self._seed >> 32, batch_index]
        random = np.random.Generator(np.random.SFC64(words))
        found = slice(rows.start, rows.stop)
        batch = self.batch_of(batch_index)
        labels[...] = random.integers(self._num_classes, size=batch, dtype=np.int32)[found]
        shape = batch, self.height, self.width
        drawn = np.frombuffer(random.bytes(4 * math.prod(shape)), np.uint32).reshape(shape)[found]
        np.bitwise_and(drawn, np.uint32(0xFFFFFF00), out=pixels)
