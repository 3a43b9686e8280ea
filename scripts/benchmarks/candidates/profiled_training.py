"""Steps of the whole engine with batches in memory: without a profile, with one outside of its window, or inside it."""

import sys

from gated_training import serve_training
from loop_engine import BatchesInMemory
from protocol import Channel
from pulls import ReadyBatches
from small_perceptron import NUM_CLASSES, Perceptron

# The window of a run whose measured steps come later, and of one whose measured steps are all inside.
_WINDOWS = {"outside": "0:1", "inside": f"1:{2**31}"}


def main(model: str, size: int, batch: int, where: str) -> None:
    """Serve steps; `where` is "off", "outside" or "inside", `model` one of the registry or "perceptron"."""
    channel = Channel()
    config = {"num_classes": NUM_CLASSES, "profile": where != "off", "profile_steps": _WINDOWS.get(where)}
    if model == "perceptron":
        serve_training(channel, config, BatchesInMemory(size), amount=1.0, model=Perceptron(size, 64))
    else:
        serve_training(channel, config | {"model": model}, ReadyBatches(batch, size), amount=1.0, warm_units=5)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
