"""The engine trains a model from packed shards, or the same program on batches that nobody has to read."""

import sys

from gated_training import serve_training
from protocol import Channel
from pulls import ReadyBatches

from engine.batches import ShardBatches
from preprocess.shards import open_split


def main(kind: str, data: str, split: str, model: str, batch: int) -> None:
    """Serves `batch` images a step."""
    channel = Channel()
    opened = open_split(data, split)
    config = {"model": model, "num_classes": opened.num_classes}
    shards = ShardBatches(opened, batch=batch, seed=0)
    source = shards if kind == "packed" else ReadyBatches(batch, opened.height)
    serve_training(channel, config, source, amount=batch)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
