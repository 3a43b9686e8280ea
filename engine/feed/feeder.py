"""A ring of batches in host memory, which threads fill ahead of the device.

Owns the slots, their states (empty → filling → ready → taken by every shard → empty) and the threads; does not depend
on jax. Memory is bounded: `depth` batches, allocated once. Every wait for a batch checks that the worker threads are
alive, and has a time limit. An exception of the source is kept in the slot and raised when that batch is taken.
"""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.feed.batches import (
    BatchSource,
    Labels,
    LendingSource,
    Lent,
    Pixels,
    batch_of,
    label_form_of,
    label_words,
    read_meter_of,
    row_words,
    whole_of,
)
from loopfeed.engine.feed.feed_meter import FeedMeter, WaitNow
from loopfeed.engine.feed.row_copies import RowCopies, describe_places, places_of
from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.control_groups import host_memory_bytes
from loopfeed.preprocess.read_meter import NO_PROFILE
from loopfeed.preprocess.workers import Worker, wait_for

# How often a wait checks whether the workers are alive and whether it was cancelled.
_LOOK_EVERY_S = 0.25
# How long `close` waits for all threads together: stalled storage may block all of them.
_CLOSE_TIMEOUT_S = 1.0
# Batches of a few kilobytes are read further ahead: switching threads costs more than filling such a batch.
_LEAST_DEPTH = 4
_SMALL_RING_BYTES = 1 << 20
_MOST_SMALL_BATCHES = 64
# Copying a smaller batch takes as long as timing it.
_LEAST_TIMED_BYTES = 1 << 12


class FeederError(RuntimeError):
    """Failure to deliver a batch: its source is too slow, the reader threads have ended, or the ring is closed."""


def batch_bytes(source: BatchSource) -> int:
    """Return the size of one batch in host memory, in bytes."""
    return source.batch * (source.height * row_words(source) + (label_words(source) or 1)) * 4


def ring_depth(source: BatchSource, prefetch: int | None, chunk: int = 1) -> int:
    """Return the number of batches to read ahead.

    It is `prefetch` if given, else the largest of 4, two chunks, and as many batches as fit into a megabyte, up to 64.
    The last of these does not apply to a source that is not thread-safe, such as a user's function.
    """
    if prefetch is not None:
        return prefetch
    small = min(_MOST_SMALL_BATCHES, _SMALL_RING_BYTES // batch_bytes(source)) if source.thread_safe else 0
    return max(_LEAST_DEPTH, 2 * chunk, small)


type Allocate = Callable[[int], NDArray[np.uint8]]
"""Number of bytes → a block of zeros."""


class _Slot:
    """The memory of one batch, pixels followed by labels in one block, and its state."""

    def __init__(self, shape: tuple[int, int, int], label_shape: tuple[int, ...], allocate: Allocate) -> None:
        self._memory = allocate(4 * (math.prod(shape) + math.prod(label_shape)))
        self._shape, self._label_shape = shape, label_shape
        self.fit(shape[0])
        self.lent: Lent | None = None  # the images, if they are not in `pixels`
        self.batch_index = -1  # the batch in this slot; -1 while empty or being filled
        self.failure: BaseException | None = None
        self.shards_to_take = 0
        self.profile = NO_PROFILE  # of reading the batch

    def fit(self, num_rows: int) -> None:
        """Divide the memory among the pixels and labels of a batch of so many images, at most those of the largest."""
        shape, label_shape = (num_rows, *self._shape[1:]), (num_rows, *self._label_shape[1:])
        num_words = math.prod(shape)
        self.block = self._memory[: 4 * (num_words + math.prod(label_shape))]
        self.pixels: Pixels = self.block[: 4 * num_words].view(np.uint32).reshape(shape)
        self.labels: Labels = self.block[4 * num_words :].view(np.int32).reshape(label_shape)

    def release_memory(self) -> None:
        """Release the memory and the batch in it."""
        self.batch_index = -1
        self._memory = self.block = self.block[:0].copy()
        self.pixels, self.labels = self.pixels[:0].copy(), self.labels[:0].copy()


class Feeder:
    """A reader that reads batches `start_index` … `stop_index` - 1 ahead of the program, each exactly once.

    Args:
        source: fills a slot with a batch.
        rows: the consecutive rows of the largest batch that are read, those of this process; None reads all. Of a
            smaller batch, the same share is read.
        start_index, stop_index: the half-open range of batches to read, counted from 0.
        depth: slots of the ring, each the size of a batch.
        num_threads: threads that fill slots, and threads that copy a large batch in `take`. A source that is not
            thread-safe is always read by one thread.
        num_shards: parts of a batch that are taken separately, of batch / num_shards images each.
        timeout_s: longest wait of `take`, in seconds.
        name_batch: batch index → name of the batch in messages.

    Attributes:
        shard_batch: b, number of images in a shard of the largest batch.
        shard_shape: shape of that shard's pixels, [b, H, words per row].
        label_shape: shape of its labels, [b], or [b, words per label] if they are not class numbers.
        is_dense: whether the pixels are in the dense layout.
        has_extents: whether the words of each label have the picture's extent, behind the weight if `has_weights`.
        depth: number of slots, at most the number of batches.
        most_borrowed: batches that may be between `borrow` and `give_back` while the next is filled.
        batch_bytes: the size of these rows of the largest batch in host memory, in bytes.
        bytes_taken: the size of the batches that were taken completely, in bytes.
        meter: what the batches were waited for.
        start_index, stop_index, timeout_s: as given.
    """

    def __init__(
        self,
        source: BatchSource,
        *,
        rows: range | None = None,
        start_index: int,
        stop_index: int,
        depth: int,
        num_threads: int,
        timeout_s: float,
        num_shards: int = 1,
        name_batch: Callable[[int], str] = lambda batch_index: f"pull {batch_index + 1}",
    ) -> None:
        self._rows = range(source.batch) if rows is None else rows
        num_rows = len(self._rows)
        if num_rows % num_shards:
            raise SettingError(
                "batch",
                "{setting} must be a multiple of the number of devices, {num_devices}, got {found}",
                num_devices=num_shards,
                found=num_rows,
            )
        self.shard_batch = num_rows // num_shards
        self.shard_shape = self.shard_batch, source.height, row_words(source)
        words = label_words(source)
        self.label_shape = (self.shard_batch,) if words is None else (self.shard_batch, words)
        self.has_extents, self.has_weights = whole_of(source) is not None, label_form_of(source) is not None
        self.is_dense = row_words(source) != source.width
        self._source, self._num_shards = source, num_shards
        self.start_index, self.stop_index = start_index, stop_index
        self.timeout_s, self._name_batch = timeout_s, name_batch
        self.depth = max(1, min(depth, stop_index - start_index))
        self._num_threads = min(num_threads, self.depth) if source.thread_safe else 1
        # A worker woken for every free slot would take the GIL from the program at every step, so workers wake once
        # half of the ring is free; but if the workers can fill all slots at once, none may wait for a second slot.
        self._least_free = max(1, min(self.depth // 2, self.depth - self._num_threads))
        self.most_borrowed = self.depth - self._least_free
        self._allocate: Allocate | None = None
        self.batch_bytes = batch_bytes(source) // source.batch * num_rows
        self._times_copies = self.batch_bytes >= _LEAST_TIMED_BYTES
        self.meter = FeedMeter(read_meter_of(source), start_index)
        self._copies = RowCopies(num_threads)
        self._slots: list[_Slot] = []
        self._workers: list[Worker[None]] = []
        self._filling: dict[int, int] = {}  # which thread fills a batch
        self._guard = threading.Lock()
        self._filled = threading.Condition(self._guard)  # takers wait for a batch or the close
        self._emptied = threading.Condition(self._guard)  # workers wait for a free slot or the close
        self._next_fill = start_index  # guarded by _guard, as are the following
        self._next_release = start_index
        self.bytes_taken = 0
        self._num_waiting = 0
        self._closed = False

    def start(self, allocate: Allocate | None = None) -> None:
        """Allocate the ring and start reading ahead; call this method once.

        Args:
            allocate: allocates the memory of a slot, from which a device can copy. Every batch is then in its slot,
                none in memory lent by the source. None uses NumPy's memory and allows lending.

        Raises:
            SettingError: the ring is larger than the memory of this machine, which could be filled by it.
        """
        self._allocate = allocate
        self._check_memory()
        allocate = allocate or (lambda num_bytes: np.zeros(num_bytes, np.uint8))
        shape, label_shape = ((len(self._rows), *each[1:]) for each in (self.shard_shape, self.label_shape))
        self._slots = [_Slot(shape, label_shape, allocate) for _ in range(self.depth)]
        for number in range(self._num_threads):
            self._workers.append(Worker(self._work, f"feeder-{number}").start(is_attended=False))

    def shard_shapes(self, num_rows: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a shard's pixels and labels: of `num_rows` images, or of the largest batch."""
        rows = self.shard_batch if num_rows is None else num_rows
        return (rows, *self.shard_shape[1:]), (rows, *self.label_shape[1:])

    def _rows_of(self, batch_index: int) -> range:
        batch, largest = batch_of(self._source, batch_index), self._source.batch
        return range(self._rows.start * batch // largest, self._rows.stop * batch // largest)

    def _lender(self) -> LendingSource | None:
        return self._source if self._allocate is None and isinstance(self._source, LendingSource) else None

    def _check_memory(self) -> None:
        # Of batches that are lent, one at a time may have to be copied.
        depth = self.depth if self._lender() is None else 1
        needed, available = depth * self.batch_bytes, host_memory_bytes()
        if available is not None and needed > available:
            raise SettingError(
                "batch",
                "the batches that are read ahead must fit into the memory of this machine, {available:,.1f} GB, but "
                "{depth:,} of {setting} {batch:,} take {needed:,.1f} GB: use a smaller {setting} or {prefetch}",
                available=available / 1e9,
                needed=needed / 1e9,
                depth=depth,
                batch=len(self._rows),
            )

    def take(
        self,
        batch_index: int,
        shard: int,
        pixels: Pixels,
        labels: Labels,
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> float | None:
        """Copy a shard of a batch out of the ring; batches must be taken in order, but their shards need not be.

        Args:
            batch_index, shard: address of the shard.
            pixels, labels: uint32 [b, H, words per row] and int32 of `label_shape`, b = batch / num_shards; written.
            is_cancelled: called a few times a second while waiting for the batch.

        Returns:
            Seconds waited for the batch, or None if the wait was cancelled; nothing is then taken or written.

        Raises:
            FeederError: if the batch did not arrive in time or can never arrive.
            BaseException: whatever the source raised for this batch.
        """
        slot, waited_s = self._slots[batch_index % self.depth], 0.0
        # A ready batch stays until it is taken, so its index can be read without the lock.
        if slot.batch_index != batch_index:
            started = time.perf_counter()
            try:
                if not self._wait(slot, batch_index, is_cancelled, started + self.timeout_s):
                    return None
            finally:
                # Also a wait that ends the run.
                ended = time.perf_counter()
                waited_s = ended - started
                has_come = slot.batch_index == batch_index
                self.meter.waited(batch_index, started, ended, slot.profile if has_come else None)
        self._raise_failure(slot, batch_index)
        lent = slot.lent
        images, classes = slot.pixels if lent is None else lent.images, slot.labels
        if self._num_shards > 1:
            each = len(classes) // self._num_shards
            rows = slice(shard * each, (shard + 1) * each)
            images, classes = images[rows], classes[rows]
        # The shards are copied at the same time.
        is_timed = self._times_copies and shard == 0
        started = time.perf_counter() if is_timed else 0.0
        self._copies.copy(images, pixels)
        if lent is not None:
            lent.check()
        np.copyto(labels, classes)
        if is_timed:
            self.meter.copy_s += time.perf_counter() - started
        self._release(slot)
        return waited_s

    def borrow(self, batch_index: int, *, is_cancelled: Callable[[], bool]) -> NDArray[np.uint8] | None:
        """Wait for a batch, without a time limit, and return its memory as uint8: pixels followed by labels.

        Requires num_shards = 1 and calls in the order of the batches. The memory stays unchanged until `give_back`.
        Returns None if the wait was cancelled.

        Raises:
            FeederError: if the batch can never arrive.
            BaseException: whatever the source raised for this batch.
        """
        slot = self._slots[batch_index % self.depth]
        is_late = slot.batch_index != batch_index
        if not self._wait(slot, batch_index, is_cancelled, math.inf):
            return None
        self._raise_failure(slot, batch_index)
        if is_late:
            self.meter.keep_cause(batch_index, slot.profile)
        return slot.block

    def give_back(self, batch_index: int) -> None:
        """Return the memory of a borrowed batch to the ring; batches must be given back in order."""
        self._release(self._slots[batch_index % self.depth])

    def close(self) -> None:
        """Stop the threads; safe to call repeatedly.

        Waits at most a second for all of them together, because a source may never return; the threads are daemons.
        """
        with self._filled:
            self._closed = True
            self._filled.notify_all()
            self._emptied.notify_all()
        self._copies.close()
        have_ended = wait_for(self._workers, _CLOSE_TIMEOUT_S)
        # Page-locked memory is scarce, so it is released at once, unless a thread may still write to it.
        if self._allocate is not None and have_ended:
            for slot in self._slots:
                slot.release_memory()

    @property
    def num_taken(self) -> int:
        """The number of batches that were taken completely."""
        return self._next_release - self.start_index

    @property
    def num_ready(self) -> int:
        """The number of batches in the ring that are ready or being taken; not exact while threads work."""
        return sum(slot.batch_index >= 0 for slot in self._slots)

    @property
    def num_threads(self) -> int:
        """The number of threads that fill slots."""
        return self._num_threads

    def _release(self, slot: _Slot) -> None:
        with self._guard:
            slot.shards_to_take -= 1
            if slot.shards_to_take == 0:
                slot.batch_index = -1
                self._next_release += 1
                self.bytes_taken += slot.block.nbytes
                num_free = self.depth - (self._next_fill - self._next_release)
                if num_free >= self._least_free:
                    self._emptied.notify(num_free)

    def _wait(self, slot: _Slot, batch_index: int, is_cancelled: Callable[[], bool], deadline: float) -> bool:
        """Wait until batch `batch_index` is in its slot; return False if the wait is cancelled.

        Raises:
            FeederError: if the deadline has passed, or no reader thread is left.
        """

        def ready() -> bool:
            return slot.batch_index == batch_index or self._closed

        with self._guard:
            self._num_waiting += 1
            self.meter.waiting = WaitNow(batch_index, time.perf_counter())
            try:
                while not self._filled.wait_for(ready, min(_LOOK_EVERY_S, max(0.0, deadline - time.perf_counter()))):
                    if is_cancelled():
                        return False
                    self._check_can_arrive(batch_index, deadline)
            finally:
                self._num_waiting -= 1
                self.meter.waiting = None
        return True

    def _raise_failure(self, slot: _Slot, batch_index: int) -> None:
        """Raise the source's exception for this batch, or FeederError if the ring closed before the batch arrived."""
        if slot.failure is not None:
            raise slot.failure
        if slot.batch_index != batch_index:
            raise FeederError(f"the feeder was closed while {self._name_batch(batch_index)} waited for its batch")

    def check_is_in_time(self, batch_index: int, deadline: float) -> None:
        """Raise FeederError if `time.perf_counter` has passed the deadline (in seconds) for a missing batch."""
        if time.perf_counter() >= deadline:
            late = f"the batch of {self._name_batch(batch_index)} did not arrive within {self.timeout_s:g} s because"
            places = places_of(self._filling.get(batch_index))
            if any("jax" in Path(file).parts for file, *_ in places):
                raise FeederError(
                    f"{late} its source waits for a result of jax, and the training program may occupy all of jax's "
                    "threads: use NumPy in the source, or set PJRT_NPROC in the environment to more than the number of "
                    f"devices. {describe_places(places)}"
                )
            where = f". {describe_places(places)}" if places else ""
            raise FeederError(
                f"{late} the source has stalled or is too slow: check the storage, or raise --infeed-timeout{where}"
            )

    def _check_can_arrive(self, batch_index: int, deadline: float) -> None:
        self.check_is_in_time(batch_index, deadline)
        if not any(each.is_at_work for each in self._workers):
            raise FeederError(
                f"the batch of {self._name_batch(batch_index)} cannot arrive: every reader thread has ended"
            )

    def _work(self) -> None:
        """Claim batches and fill their slots until all are read or the ring closes; runs on each worker thread."""
        lender = self._lender()
        reading = self.meter.readings.join()
        while (claimed := self._claim()) is not None:
            batch_index, slot = claimed
            self._filling[batch_index] = threading.get_ident()
            reading.begin(batch_index)
            try:
                rows = self._rows_of(batch_index)
                if len(rows) != len(slot.labels):
                    slot.fit(len(rows))
                slot.lent = (
                    None if lender is None else lender.lend(batch_index, rows, slot.labels, timeout_s=self.timeout_s)
                )
                if slot.lent is None:
                    self._source.fill(batch_index, rows, slot.pixels, slot.labels, timeout_s=self.timeout_s)
                failure = None
            except BaseException as error:  # noqa: BLE001 - raised, with its traceback, when this batch is taken
                failure = error
            del self._filling[batch_index]
            slot.profile = reading.end()
            with self._guard:
                slot.failure, slot.shards_to_take, slot.batch_index = failure, self._num_shards, batch_index
                if self._num_waiting:
                    self._filled.notify_all()
            if failure is not None:
                return

    def _claim(self) -> tuple[int, _Slot] | None:
        """Claim the next batch once its slot is empty; return None if no batch is left or the ring is closed."""
        with self._guard:
            # Without a time limit, because a step may take an hour; close() ends the wait.
            while not self._closed and self._next_fill < self.stop_index:
                if self._next_fill < self._next_release + self.depth:
                    batch_index = self._next_fill
                    self._next_fill += 1
                    return batch_index, self._slots[batch_index % self.depth]
                self._emptied.wait(_LOOK_EVERY_S)
        return None
