"""The engine trains a model: from packed shards ("packed"), or the same program on other batches.

"ready": on batches in the host's memory, so that nothing is read; "resident": on batches on a card, so that nothing is
copied there either; "memory": on batches of 32 images, copied from memory. The model is one of the registry, or
"perceptron-64", which has so many hidden units.
"""

import sys

import numpy as np
from gated_training import ReadyBatches, serve_training
from protocol import Channel
from small_perceptron import BATCH, NUM_CLASSES, draw_batches, perceptron_of

from loopfeed.engine.crossing.cuda.driver import CudaDriver
from loopfeed.engine.feed.batches import Labels, Pixels
from loopfeed.engine.feed.shard_batches import ShardBatches
from loopfeed.preprocess.shards.reader import open_split

# Control words have fewer bytes, batches more.
FEW_BYTES = 1024


class BatchesInMemory:
    """A source that copies its batches from memory, cyclically."""

    thread_safe = True
    batch = BATCH

    def __init__(self, size: int) -> None:
        self.height = self.width = size
        self._pixels, self._labels = draw_batches(size, BATCH, NUM_CLASSES)

    def fill(self, step: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Copy a batch."""
        number = step % len(self._pixels)
        np.copyto(pixels, self._pixels[number])
        np.copyto(labels, self._labels[number])


def leave_out_copies() -> None:
    """Make a card's ring copy only one batch into each of its slots, which is then reused for training."""
    copy = CudaDriver.copy_to_device
    filled: set[int] = set()

    def copy_words(driver: CudaDriver, target: int, source: int, num_bytes: int, stream: int) -> None:
        if num_bytes <= FEW_BYTES or target not in filled:
            copy(driver, target, source, num_bytes, stream)
            filled.add(target)

    CudaDriver.copy_to_device = copy_words  # type: ignore[method-assign, assignment]


def train_in_memory(model: str, size: int, chunk: int) -> None:
    """Serve steps, in chunks of so many batches."""
    config = {"num_classes": NUM_CLASSES, "chunk_batches": chunk}
    serve_training(Channel(), config, BatchesInMemory(size), amount=1.0, model=perceptron_of(model, size))


def train_on_split(
    kind: str, model: str, data: str, batch: int, warm_steps: int, precision: str, crop_size: int
) -> None:
    """Serve `batch` images a step, after `warm_steps` steps; of random crops with sides of `crop_size`, if given."""
    channel = Channel()
    opened = open_split(data, "train")
    own = perceptron_of(model, crop_size or opened.height, opened.num_classes)
    config = {"num_classes": opened.num_classes, "model": "auto" if own else model, "precision": precision}
    if crop_size:
        config |= {"image_size": crop_size, "crop": "resized", "flip": 0.5}
    shards = ShardBatches(opened, batch=batch, seed=0)
    source = shards if kind == "packed" else ReadyBatches(batch, opened.height, shards if crop_size else None)
    if kind == "resident":
        leave_out_copies()
    serve_training(channel, config, source, amount=batch, model=own, warm_units=warm_steps)


if __name__ == "__main__":
    kind, model, given = *sys.argv[1:3], sys.argv[3:]
    if kind == "memory":
        train_in_memory(model, *map(int, given))
    else:
        precision = given[3] if len(given) > 3 else "float32"
        crop_size = int(given[4]) if len(given) > 4 else 0
        train_on_split(kind, model, given[0], int(given[1]), int(given[2]), precision, crop_size)
