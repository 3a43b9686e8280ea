"""Steps of the whole engine on a tiny network, its batches in memory: ring, infeed, loop, outfeed and sinks."""

import numpy as np
from gated_training import serve_training
from protocol import Channel
from small_perceptron import BATCH, NUM_CLASSES, SIZE, Perceptron, draw_batches

from engine.batches import Labels, Pixels


class BatchesInMemory:
    """A source that copies its batches from memory, over and over."""

    thread_safe = True
    batch, height, width = BATCH, SIZE, SIZE

    def __init__(self) -> None:
        self._pixels, self._labels = draw_batches()

    def fill(self, step: int, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Copies a batch."""
        number = step % len(self._pixels)
        np.copyto(pixels, self._pixels[number])
        np.copyto(labels, self._labels[number])


if __name__ == "__main__":
    channel = Channel()
    serve_training(channel, {"num_classes": NUM_CLASSES}, BatchesInMemory(), amount=1.0, model=Perceptron())
