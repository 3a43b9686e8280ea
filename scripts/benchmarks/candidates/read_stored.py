"""Loopfeed's reader on a store that answers late, in the random or the windowed order, with and without a cache."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np
from protocol import Channel, timed

from loopfeed import TrainConfig
from loopfeed.engine.feed.feeder import Feeder, ring_depth
from loopfeed.engine.feed.shard_batches import ShardBatches
from loopfeed.engine.feed.windowed_batches import WindowedBatches
from loopfeed.preprocess.shards.reader import ShardSplit, open_split
from loopfeed.preprocess.shards.shard_cache import ShardCache

DEFAULTS = TrainConfig()
_WINDOW_GB = 0.2
# A candidate is stopped while others have their turns.
_TIMEOUT_S = 900.0


def main(data: str, split: str, batch: int, order: str, cached: str, delay_ms: str) -> None:
    """Serve batches of `batch` images; with `cached` = cold, serve whole epochs, each with an empty cache."""
    channel = Channel()
    folder = Path(data)
    endpoint = _serve(folder.parent, delay_ms)
    place = Path("cache", cached if cached == "warm" else f"{order}-{delay_ms}")
    options = {"endpoint": endpoint, "credentials": "anonymous"}

    @contextmanager
    def batches() -> Iterator[tuple[ShardSplit, Callable[[], None]]]:
        cache = None if cached == "none" else ShardCache(place, 1 << 40, print)
        with ExitStack() as stack:
            opened = stack.enter_context(
                open_split(f"s3://bucket/{folder.name}", split, storage_options=options, cache=cache)
            )
            yield opened, stack.enter_context(_taking(opened, batch, order))

    def read_epochs(num_epochs: int) -> None:
        for _ in range(num_epochs):
            with batches() as (opened, take):
                for _ in range(opened.num_images // batch):
                    take()
            shutil.rmtree(place, ignore_errors=True)

    versions = {package: version(package) for package in ("tensorstore", "numpy")}
    facts = {"delay_ms": delay_ms, "window_gb": _WINDOW_GB if order == "windowed" else None}
    if cached == "cold":
        with batches() as (opened, _):
            amount = opened.num_images // batch * batch
        shutil.rmtree(place, ignore_errors=True)
        channel.ready(amount, versions=versions, facts=facts)
        channel.serve(timed(read_epochs))
    with batches() as (opened, take):
        for _ in range(opened.num_images // batch if cached == "warm" else 1):
            take()
        if opened.copies is not None:
            shards = range(opened.manifest.num_shards)
            opened.copies.request(shards)
            for shard in shards:
                opened.copies.wait(shard, timeout_s=600)
        channel.ready(batch, versions=versions, facts=facts)
        channel.serve(timed(lambda num_batches: [take() for _ in range(num_batches)]))


def _serve(folder: Path, delay_ms: str) -> str:
    """Start a server of the folder and return its address; it ends with this process."""
    words = [sys.executable, "-m", "scripts.benchmarks.delayed_store", str(folder), delay_ms]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return f"http://127.0.0.1:{int(process.stdout.readline())}"


@contextmanager
def _taking(opened: ShardSplit, batch: int, order: str) -> Iterator[Callable[[], None]]:
    """Read ahead, and yield a function that takes the next batch."""
    with ExitStack() as stack:
        source: ShardBatches | WindowedBatches = ShardBatches(opened, batch=batch, seed=0)
        if order == "windowed":
            source = WindowedBatches(
                opened,
                batch=batch,
                seed=0,
                window_gb=_WINDOW_GB,
                rows=range(batch),
                first_batch=0,
                num_threads=DEFAULTS.reader_threads,
                timeout_s=_TIMEOUT_S,
            )
            stack.callback(source.close)
        feeder = Feeder(
            source,
            start_index=0,
            stop_index=2**31 - 1,
            depth=ring_depth(source, DEFAULTS.prefetch),
            num_threads=DEFAULTS.reader_threads,
            timeout_s=_TIMEOUT_S,
        )
        stack.callback(feeder.close)
        feeder.start()
        pixels, labels = np.zeros((batch, opened.height, opened.row_words), np.uint32), np.zeros(batch, np.int32)
        step = 0

        def take() -> None:
            nonlocal step
            feeder.take(step, 0, pixels, labels)
            step += 1

        yield take


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
