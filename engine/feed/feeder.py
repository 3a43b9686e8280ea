"""The ring of batches that threads fill ahead of the device.

Owns the slots, their life (empty → filling → ready → taken by every shard → empty) and the threads; knows nothing
of jax. Memory is bounded: `depth` batches, allocated once. Whoever waits has a time limit and looks whether its
workers live; what a source raises is kept in its slot and raised to the taker when that batch is due.
"""

import math
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.feed.batches import BatchSource, Labels, LendingSource, Lent, Pixels, row_words
from engine.feed.row_copies import RowCopies
from engine.settings import SettingError

# How long a wait lasts before it looks again whether the workers live and whether it is still wanted.
_LOOK_EVERY_S = 0.25
# How long `close` waits for the threads, all together: a stalled store may hold every one of them.
_CLOSE_TIMEOUT_S = 1.0
# Batches of a few kilobytes are read further ahead: the threads then take turns less often, which costs more than they.
_LEAST_DEPTH = 4
_SMALL_RING_BYTES = 1 << 20
_MOST_SMALL_BATCHES = 64


class FeederError(RuntimeError):
    """The ring cannot give the batch that is due: its source is too slow, its threads are gone, or it is closed."""


def batch_bytes(source: BatchSource) -> int:
    """Host memory of one of a source's batches."""
    return source.batch * (source.height * row_words(source) + 1) * 4


def ring_depth(source: BatchSource, prefetch: int | None, chunk: int = 1) -> int:
    """How many batches to read ahead: `prefetch`, or 4 and two chunks, and as many as a megabyte holds, up to 64.

    A function of the user's, which is not thread-safe, is asked no earlier for a small batch than for a large one.
    """
    if prefetch is not None:
        return prefetch
    small = min(_MOST_SMALL_BATCHES, _SMALL_RING_BYTES // batch_bytes(source)) if source.thread_safe else 0
    return max(_LEAST_DEPTH, 2 * chunk, small)


type Allocate = Callable[[int], NDArray[np.uint8]]
"""Bytes → zeros in one block."""


class _Slot:
    """One batch's memory, pixels and then labels in one block, and what happened to it."""

    def __init__(self, batch: int, height: int, words: int, allocate: Allocate) -> None:
        num_words = batch * height * words
        self.block = allocate(4 * (num_words + batch))
        self.pixels: Pixels = self.block[: 4 * num_words].view(np.uint32).reshape(batch, height, words)
        self.labels: Labels = self.block[4 * num_words :].view(np.int32)
        self.lent: Lent | None = None  # the images, where they are not in `pixels`
        self.batch_index = -1  # of the batch that is here, -1 while empty or being filled
        self.failure: BaseException | None = None
        self.shards_to_take = 0

    def let_go(self) -> None:
        """Gives up the memory, and the batch in it."""
        self.batch_index, self.block = -1, self.block[:0].copy()
        self.pixels, self.labels = self.pixels[:0].copy(), self.labels[:0].copy()


class Feeder:
    """Reads batches `start_index` … `stop_index` - 1 ahead of the program, each exactly once.

    Args:
        source: fills a slot with a batch.
        start_index, stop_index: the half-open range of batches to read, counted from 0.
        depth: slots of the ring, each the size of a batch.
        num_threads: threads that fill; one, whatever is asked for, where the source is not thread-safe. A large batch
            is taken by as many.
        num_shards: parts of a batch that are taken one by one, each batch / num_shards images.
        timeout_s: the longest that `take` waits.
        name_batch: batch index → in words what the batch is for.
        allocate: gives the memory of a slot, in which every batch then is, and none lent by its source: it is to be
            copied from by other means than the processor's. None takes NumPy's.

    Attributes:
        shard_batch: images of a part.
        shard_shape: of its pixels, [b, H, words of a row].
        is_dense: whether they are of the dense layout.
        depth: slots that there are, no more than steps.
        most_borrowed: batches that may be kept between `borrow` and `give_back` while the next is filled.
        start_index, stop_index, timeout_s: as given.
    """

    def __init__(
        self,
        source: BatchSource,
        *,
        start_index: int,
        stop_index: int,
        depth: int,
        num_threads: int,
        timeout_s: float,
        num_shards: int = 1,
        name_batch: Callable[[int], str] = lambda batch_index: f"pull {batch_index + 1}",
        allocate: Allocate | None = None,
    ) -> None:
        if source.batch % num_shards:
            raise SettingError(
                "batch",
                "{setting} must be a multiple of the {num_devices} devices, got {found}",
                num_devices=num_shards,
                found=source.batch,
            )
        self.shard_batch = source.batch // num_shards
        self.shard_shape = self.shard_batch, source.height, row_words(source)
        self.is_dense = row_words(source) != source.width
        self._source, self._num_shards = source, num_shards
        self.start_index, self.stop_index = start_index, stop_index
        self.timeout_s, self._name_batch = timeout_s, name_batch
        self.depth = max(1, min(depth, stop_index - start_index))
        self._num_threads = min(num_threads, self.depth) if source.thread_safe else 1
        # Woken for every slot, a worker would take the interpreter from the program at every step; but where all slots
        # may be with workers at once none is to wait for a second one.
        self._least_free = max(1, min(self.depth // 2, self.depth - self._num_threads))
        self.most_borrowed = self.depth - self._least_free
        self._allocate = allocate
        self._copies = RowCopies(num_threads)
        self._slots: list[_Slot] = []
        self._threads: list[threading.Thread] = []
        self._guard = threading.Lock()
        self._filled = threading.Condition(self._guard)  # a batch is there, or never will be: takers wait for it
        self._emptied = threading.Condition(self._guard)  # a slot is free, or the ring is closed: workers wait for it
        self._next_fill = start_index  # guarded, like the rest
        self._next_release = start_index
        self._num_waiting = 0
        self._closed = False

    def start(self) -> None:
        """Allocates the ring and starts to read ahead; called once."""
        source, allocate = self._source, self._allocate or (lambda num_bytes: np.zeros(num_bytes, np.uint8))
        self._slots = [_Slot(source.batch, source.height, row_words(source), allocate) for _ in range(self.depth)]
        for number in range(self._num_threads):
            thread = threading.Thread(target=self._work, name=f"feeder-{number}", daemon=True)
            thread.start()
            # Only now: a thread that the system refuses to start cannot be joined by `close`.
            self._threads.append(thread)

    def take(
        self,
        batch_index: int,
        shard: int,
        pixels: Pixels,
        labels: Labels,
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> float | None:
        """Copies a shard of a batch out of the ring; batches must be taken in order, shards in any.

        Args:
            batch_index, shard: the address of the batch's part.
            pixels, labels: uint32 [b, H, words of a row] and int32 [b], b = batch / num_shards, written.
            is_cancelled: asked a few times a second while the batch is not there.

        Returns:
            Seconds waited for the batch; None where the wait was cancelled, nothing then being taken or written.

        Raises:
            FeederError: where the batch did not come in time or never can.
            BaseException: whatever the source raised for this batch.
        """
        slot, started = self._slots[batch_index % self.depth], None
        # A batch that is there stays until it is taken: no lock is needed to see it.
        if slot.batch_index != batch_index:
            started = time.perf_counter()
            if not self._wait(slot, batch_index, is_cancelled, started + self.timeout_s):
                return None
        waited_s = 0.0 if started is None else time.perf_counter() - started
        self._check_is_sound(slot, batch_index)
        lent = slot.lent
        images, classes = slot.pixels if lent is None else lent.images, slot.labels
        if self._num_shards > 1:
            rows = slice(shard * self.shard_batch, (shard + 1) * self.shard_batch)
            images, classes = images[rows], classes[rows]
        self._copies.copy(images, pixels)
        if lent is not None:
            lent.check()
        np.copyto(labels, classes)
        self._release(slot)
        return waited_s

    def borrow(self, batch_index: int, *, is_cancelled: Callable[[], bool]) -> NDArray[np.uint8] | None:
        """Waits for a batch, however long, and gives its memory, uint8, pixels and then labels.

        For one part of a batch, in order; each stays as it is until `give_back`. None where the wait was cancelled.

        Raises:
            FeederError: where the batch never can come.
            BaseException: whatever the source raised for this batch.
        """
        slot = self._slots[batch_index % self.depth]
        if not self._wait(slot, batch_index, is_cancelled, math.inf):
            return None
        self._check_is_sound(slot, batch_index)
        return slot.block

    def give_back(self, batch_index: int) -> None:
        """Frees the memory of a batch; called in order."""
        self._release(self._slots[batch_index % self.depth])

    def close(self) -> None:
        """Stops the threads; may be called again.

        Waits a second at most, for all of them: a source may be stuck for good, and they are daemons.
        """
        with self._filled:
            self._closed = True
            self._filled.notify_all()
            self._emptied.notify_all()
        self._copies.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        # Page-locked memory is dear; what a thread still writes to stays.
        if self._allocate is not None and not any(thread.is_alive() for thread in self._threads):
            for slot in self._slots:
                slot.let_go()

    def _release(self, slot: _Slot) -> None:
        with self._guard:
            slot.shards_to_take -= 1
            if slot.shards_to_take == 0:
                slot.batch_index = -1
                self._next_release += 1
                num_free = self.depth - (self._next_fill - self._next_release)
                if num_free >= self._least_free:
                    self._emptied.notify(num_free)

    def _wait(self, slot: _Slot, batch_index: int, is_cancelled: Callable[[], bool], deadline: float) -> bool:
        """Waits until batch `batch_index` is in its slot, giving True, or cancelled, giving False.

        Raises:
            FeederError: when the time is over, or nobody is left who could make it ready.
        """

        def ready() -> bool:
            return slot.batch_index == batch_index or self._closed

        with self._guard:
            self._num_waiting += 1
            try:
                while not self._filled.wait_for(ready, min(_LOOK_EVERY_S, max(0.0, deadline - time.perf_counter()))):
                    if is_cancelled():
                        return False
                    self._check_is_to_come(batch_index, deadline)
            finally:
                self._num_waiting -= 1
        return True

    def _check_is_sound(self, slot: _Slot, batch_index: int) -> None:
        """Raises what the source did for a batch whose turn it is, or that the ring was closed before it came."""
        if slot.failure is not None:
            raise slot.failure
        if slot.batch_index != batch_index:
            raise FeederError(f"the feeder was closed while {self._name_batch(batch_index)} waited for its batch")

    def check_is_in_time(self, batch_index: int, deadline: float) -> None:
        """Raises FeederError where a batch, which is not there, is too late by perf_counter's clock."""
        if time.perf_counter() >= deadline:
            raise FeederError(
                f"the batch of {self._name_batch(batch_index)} must be there within {self.timeout_s:g} s, and was not: "
                "the source has stalled or is too slow; look at the storage, or raise --infeed-timeout"
            )

    def _check_is_to_come(self, batch_index: int, deadline: float) -> None:
        self.check_is_in_time(batch_index, deadline)
        if not any(thread.is_alive() for thread in self._threads):
            raise FeederError(
                f"the batch of {self._name_batch(batch_index)} cannot come: every reader thread has ended"
            )

    def _work(self) -> None:
        """A worker's life: claim the next batch, wait for its slot, fill it, until all is read or the ring closes."""
        lender = self._source if self._allocate is None and isinstance(self._source, LendingSource) else None
        while (claimed := self._claim()) is not None:
            batch_index, slot = claimed
            try:
                slot.lent = None if lender is None else lender.lend(batch_index, slot.labels, timeout_s=self.timeout_s)
                if slot.lent is None:
                    self._source.fill(batch_index, slot.pixels, slot.labels, timeout_s=self.timeout_s)
                failure = None
            except BaseException as error:  # noqa: BLE001 - raised to whoever takes this batch, traceback included
                failure = error
            with self._guard:
                slot.failure, slot.shards_to_take, slot.batch_index = failure, self._num_shards, batch_index
                if self._num_waiting:
                    self._filled.notify_all()
            if failure is not None:
                return

    def _claim(self) -> tuple[int, _Slot] | None:
        """Takes the next batch for this thread once its slot is empty; None when there is nothing left to do."""
        with self._guard:
            # Not a wait for work done elsewhere: it ends with close(), and a program may take an hour over a step.
            while not self._closed and self._next_fill < self.stop_index:
                if self._next_fill < self._next_release + self.depth:
                    batch_index = self._next_fill
                    self._next_fill += 1
                    return batch_index, self._slots[batch_index % self.depth]
                self._emptied.wait(_LOOK_EVERY_S)
        return None
