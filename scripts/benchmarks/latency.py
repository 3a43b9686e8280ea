"""`latency`: Loopfeed reads images of 224 px from a store that answers late: random, windowed, and with a cache.

The store is a server of this machine that waits before it answers each request, so its bandwidth is that of memory.
"""

from scripts.benchmarks.bench import IMAGES_PER_S, Bench, Candidate, Case, Settings
from scripts.benchmarks.data import SPLIT, Say, ensure_shards, shards_folder

_NUM_IMAGES, _SIZE, _BATCH = 2048, 224, 128
# As many shards as leave few images of a batch in the same one, as in a large data set.
_SHARD_IMAGES = 16
_DELAYS_MS = (20, 100)
# name, order, cache
_READERS = (
    ("random", "random", "none"),
    ("windowed", "windowed", "none"),
    ("random, cold cache", "random", "cold"),
    ("windowed, cold cache", "windowed", "cold"),
    ("random, warm cache", "random", "warm"),
    ("windowed, warm cache", "windowed", "warm"),
)


def _cases(settings: Settings) -> list[Case]:
    folder = shards_folder(settings, num_images=_NUM_IMAGES, size=_SIZE, shard_images=_SHARD_IMAGES)

    def prepare(say: Say) -> None:
        ensure_shards(settings, say, num_images=_NUM_IMAGES, size=_SIZE, shard_images=_SHARD_IMAGES)

    return [
        Case(
            f"{delay_ms} ms of latency, {_NUM_IMAGES} × {_SIZE} px raw, b{_BATCH}",
            IMAGES_PER_S,
            "random",
            tuple(
                Candidate(name, "read_stored.py", (str(folder), SPLIT, str(_BATCH), order, cached, str(delay_ms)))
                for name, order, cached in _READERS
            ),
            round_s=4.0,
            prepare=prepare,
        )
        for delay_ms in _DELAYS_MS
    ]


BENCH = Bench("latency", "packed images of 224 px in a store that answers late, by order and cache", _cases)
