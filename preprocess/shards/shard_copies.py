"""Copies the shard files of one split from its store into a cache, on threads of their own.

Owns the threads and which shards are wanted. A failed copy is no error: the images are then read from the store, which
raises what is wrong. Does not read images.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from loopfeed.preprocess.shards.arrays import PIXELS, shard_key
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.shard_cache import ShardCache
from loopfeed.preprocess.workers import Pool

_NUM_THREADS = 16
_PART_BYTES = 8 << 20
# A shard that failed so often, or was damaged so often, is left to the store.
_MOST_FAILURES = 2
# A shard that another process is copying, or for which there is no room, is not tried again at once.
_RETRY_AFTER_S = 1.0
_LOOK_EVERY_S = 0.1
_CLOSE_TIMEOUT_S = 1.0


class ShardCopies:
    """The shard files of one split in a cache.

    Args:
        cache: the cache.
        split: the folder of the split, in a store.
        manifest: its manifest.
        digest: names the pack in the cache, see `loopfeed.preprocess.shards.shard_cache`.

    Attributes:
        shard_bytes: the size of one shard file, or more.
        num_bytes: the size of all shard files, or more.
        num_cached: the number of shards that may be copied, counted from the first; the cache has no room for others.
    """

    def __init__(self, cache: ShardCache, split: Location, manifest: Manifest, digest: str) -> None:
        self._cache, self._pack, self._manifest = cache, digest, manifest
        self._store = split.child(PIXELS)
        self.shard_bytes, num_shards = self._bound(0), manifest.num_shards
        self.num_bytes = (num_shards - 1) * self.shard_bytes + self._bound(num_shards - 1)
        granted = cache.grant(self.num_bytes)
        self.num_cached = num_shards if granted == self.num_bytes else granted // self.shard_bytes
        self._present: set[int] = set()
        self._pending: set[int] = set()
        self._tried: dict[int, float] = {}
        self._failures: Counter[int] = Counter()
        self._changed = threading.Condition()  # guards everything above, from `_present` on
        self._threads = Pool(_NUM_THREADS, "shard-copies")
        self._closed = False

    def request(self, shards: Iterable[int]) -> None:
        """Copy the shards that are not in the cache, in this order, in the background."""
        wanted: list[int] = []
        with self._changed:
            for shard in shards:
                if self._is_present(shard):
                    self._cache.touch(self._pack, shard)
                elif self._may_copy(shard):
                    self._pending.add(shard)
                    wanted.append(shard)
        for shard in wanted:
            self._threads.submit(self._try_to_copy, shard)

    def wait(self, shard: int, *, timeout_s: float) -> None:
        """Wait until a requested shard is in the cache, or will not be; at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: shard not in self._pending or self._closed, timeout_s)

    def report_damage(self, shard: int) -> None:
        """Remove a copy that is not sound; it is copied again at the next request, but not endlessly."""
        with self._changed:
            if shard in self._present:
                self._present.discard(shard)
                self._failures[shard] += 1
                self._cache.drop(self._pack, shard)

    def forget(self, shard: int) -> None:
        """Note that a copy was removed by another process."""
        with self._changed:
            self._present.discard(shard)

    def is_present(self, shard: int) -> bool:
        """Return whether a copy of a shard was there when it was last requested."""
        return shard in self._present

    def close(self) -> None:
        """Stop copying; a part that is being read is finished first, or abandoned after a second."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.close(_CLOSE_TIMEOUT_S)

    def _is_present(self, shard: int) -> bool:
        if shard not in self._present and shard < self.num_cached and self._cache.has(self._pack, shard):
            self._present.add(shard)
        return shard in self._present

    def _may_copy(self, shard: int) -> bool:
        is_due = time.monotonic() - self._tried.get(shard, -_RETRY_AFTER_S) >= _RETRY_AFTER_S
        is_hopeful = self._failures[shard] < _MOST_FAILURES
        return shard < self.num_cached and shard not in self._pending and is_due and is_hopeful

    def _try_to_copy(self, shard: int) -> None:
        if self._closed:
            return
        num_failures, is_there = 0, False
        try:
            is_there = self._copy(shard)
        except Exception:  # noqa: BLE001 - the images are then read from the store, which raises what is wrong
            num_failures = 1
        with self._changed:
            self._failures[shard] += num_failures
            self._tried[shard] = time.monotonic()
            self._pending.discard(shard)
            if is_there:
                self._present.add(shard)
            self._changed.notify_all()

    def _copy(self, shard: int) -> bool:
        """Copy a shard and return whether it is in the cache; raise ShardError if the store fails."""
        return self._cache.add(
            self._pack, shard, self._bound(shard), lambda: self._read(shard), sync=not self._manifest.checksum
        )

    def _bound(self, shard: int) -> int:
        """Return the size of a shard file in bytes, or more if it is compressed."""
        return self._manifest.shard_bytes(shard) or self._manifest.max_shard_bytes

    def _read(self, shard: int) -> Iterator[bytes]:
        key, num_bytes = shard_key(shard, 3), self._manifest.shard_bytes(shard)
        if num_bytes is None:
            content = self._store.read(key)
            if content is None:
                raise ShardError(f"{self._store.display}{key} is missing")
            yield content
            return
        for start in range(0, num_bytes, _PART_BYTES):
            if self._closed:
                raise ShardError("the split is closed")
            yield self._store.read_range(key, start, min(start + _PART_BYTES, num_bytes))
