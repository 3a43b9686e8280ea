"""Steps of the whole engine on a tiny network with batches in memory: ring, infeed, loop, outfeed and sinks."""

import sys

import numpy as np
from gated_training import serve_training
from protocol import Channel
from small_perceptron import BATCH, NUM_CLASSES, Perceptron, draw_batches

from loopfeed.engine.feed.batches import Labels, Pixels


class BatchesInMemory:
    """A source that copies its batches from memory, cyclically."""

    thread_safe = True
    batch = BATCH

    def __init__(self, size: int) -> None:
        self.height = self.width = size
        self._pixels, self._labels = draw_batches(size)

    def fill(self, step: int, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Copy a batch."""
        number = step % len(self._pixels)
        np.copyto(pixels, self._pixels[number])
        np.copyto(labels, self._labels[number])


def main(size: int, hidden: int, chunk: int) -> None:
    """Serve steps."""
    config = {"num_classes": NUM_CLASSES, "chunk_batches": chunk}
    serve_training(Channel(), config, BatchesInMemory(size), amount=1.0, model=Perceptron(size, hidden))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
