"""Loopfeed's reader: reads packed shards in keyed order into given buffers, with the engine's source and feeder."""

import sys
from importlib.metadata import version

import numpy as np
from protocol import Channel, timed

from loopfeed import TrainConfig
from loopfeed.engine.feed.feeder import Feeder, ring_depth
from loopfeed.engine.feed.shard_batches import ShardBatches
from loopfeed.preprocess.shards.reader import open_split

DEFAULTS = TrainConfig()


def main(data: str, split: str, batch: int, threads: int) -> None:
    """Serve batches of `batch` images, read by `threads` threads (0: the engine's default)."""
    channel = Channel()
    opened = open_split(data, split)
    num_threads = threads or DEFAULTS.reader_threads
    source = ShardBatches(opened, batch=batch, seed=0)
    depth = ring_depth(source, DEFAULTS.prefetch)
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
    labels = np.zeros(batch, np.int32)
    step = 0

    def work(num_units: int) -> None:
        nonlocal step
        for _ in range(num_units):
            feeder.take(step, 0, pixels, labels)
            step += 1

    # Read a whole epoch first, so that every shard is in the page cache.
    work(-(-opened.num_images // batch))
    channel.ready(
        batch,
        versions={package: version(package) for package in ("tensorstore", "numpy")},
        facts={"threads": num_threads, "ahead": depth, "bytes an image": opened.manifest.image_bytes},
    )
    channel.serve(timed(work))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
