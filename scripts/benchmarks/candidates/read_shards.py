"""Loopfeed's reader: reads packed shards in keyed order into given buffers, with the engine's source and feeder."""

import sys

import numpy as np
from protocol import Channel, timed, versions_of

from loopfeed import TrainConfig
from loopfeed.engine.feed.feeder import Feeder, ring_depth
from loopfeed.engine.feed.shard_batches import ShardBatches
from loopfeed.preprocess.shards.reader import open_split

DEFAULTS = TrainConfig()


def main(data: str, batch: int) -> None:
    """Serve batches of `batch` images."""
    channel = Channel()
    opened = open_split(data, "train")
    source = ShardBatches(opened, batch=batch, seed=0)
    depth, num_threads = ring_depth(source, DEFAULTS.prefetch), DEFAULTS.reader_threads
    feeder = Feeder(
        source,
        start_index=0,
        stop_index=2**31 - 1,
        depth=depth,
        num_threads=num_threads,
        timeout_s=60,
    )
    feeder.start()
    pixels = np.zeros((batch, opened.height, opened.row_words), np.uint32)
    labels = np.zeros((batch, *opened.label_row), np.int32)
    step = 0

    def work(num_units: int) -> None:
        nonlocal step
        for _ in range(num_units):
            feeder.take(step, 0, pixels, labels)
            step += 1

    # Read a whole epoch first, so that every shard is in the page cache.
    work(-(-opened.num_images // batch))
    facts = {"threads": num_threads, "ahead": depth, "bytes an image": opened.manifest.image_bytes}
    channel.ready(batch, versions=versions_of("tensorstore", "numpy"), facts=facts)
    channel.serve(timed(work))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
