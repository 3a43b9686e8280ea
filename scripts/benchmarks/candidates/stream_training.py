"""The engine trains a model from packed shards ("packed"), or the same program on other batches.

"ready": on batches in the host's memory, so that nothing is read; "resident": on batches on a card, so that nothing is
copied there either. The model is one of the registry, or "perceptron", which is tiny.
"""

import sys

from gated_training import leave_out_copies, serve_training
from protocol import Channel
from pulls import ReadyBatches
from small_perceptron import Perceptron

from loopfeed.engine.feed.shard_batches import ShardBatches
from loopfeed.preprocess.shards.reader import open_split


def main(
    kind: str,
    data: str,
    split: str,
    model: str,
    batch: int,
    warm_steps: int,
    precision: str = "float32",
    bits: str = "deterministic",
) -> None:
    """Serve `batch` images a step, after `warm_steps` steps; `bits` is "deterministic" or "any"."""
    channel = Channel()
    opened = open_split(data, split)
    own = Perceptron(opened.height, 64) if model == "perceptron" else None
    config = {
        "num_classes": opened.num_classes,
        "model": "auto" if own else model,
        "precision": precision,
        "deterministic": bits == "deterministic",
    }
    shards = ShardBatches(opened, batch=batch, seed=0)
    source = shards if kind == "packed" else ReadyBatches(batch, opened.height)
    if kind == "resident":
        leave_out_copies()
    serve_training(channel, config, source, amount=batch, model=own, warm_units=warm_steps)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]), *sys.argv[7:])
