"""A ring of batches in device memory, filled in advance while the program computes.

A thread takes each batch from the feeder's page-locked memory and enqueues its copy to one of a few slots on the
device, on its own stream; the program's stream then waits for the copy's event and takes the batch from the slot.
Only events define the order: nothing sleeps, and no thread waits for a copy before it enqueues the next.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from loopfeed.engine.crossing.cuda.arena import Arena
from loopfeed.engine.crossing.cuda.driver import CudaDriver
from loopfeed.engine.feed.feeder import Feeder, FeederError
from loopfeed.preprocess.workers import Worker

# The ring contains as many batches as fit into these bytes, within bounds: at least three, because two keep the copies
# going while one is taken; more if they are small, because a step of a small network ends before a thread wakes up.
_SLOTS_BYTES = 64 << 20
_LEAST_SLOTS, _MOST_SLOTS = 3, 16
_LOOK_EVERY_S = 0.25
_CLOSE_TIMEOUT_S = 5.0


def num_slots(batch_bytes: int) -> int:
    """Return how many batches of this size to keep on the device."""
    return max(_LEAST_SLOTS, min(_MOST_SLOTS, _SLOTS_BYTES // batch_bytes))


class Places(NamedTuple):
    """Addresses of the program's memory for a batch.

    Attributes:
        pixels, labels: addresses in device memory.
        pixel_bytes, label_bytes: their sizes.
    """

    pixels: int
    labels: int
    pixel_bytes: int
    label_bytes: int


class Stopwatch(NamedTuple):
    """A pair of events that measures how long a stream waited for a batch.

    Attributes:
        before, after: events with timing.
    """

    before: int
    after: int


class _Slot:
    """Device memory for a batch, and events that complete once it has been copied in (`arrived`) or out (`taken`)."""

    def __init__(self, arena: Arena, num_bytes: int) -> None:
        self.address = arena.device(num_bytes)
        self.arrived, self.taken = arena.event(), arena.event()
        self.batch_index = -1  # the batch whose copy was enqueued last
        self.num_bytes = num_bytes  # of that batch


class DeviceRing:
    """A ring of device buffers, into which a thread copies the batches of a feeder in order, each exactly once.

    Args:
        driver: driver of the device.
        feeder: started, with page-locked memory; only this ring may read from it.
        num_bytes: the size of the largest batch, pixels and labels.
    """

    def __init__(self, driver: CudaDriver, feeder: Feeder, *, num_bytes: int) -> None:
        self._driver, self._feeder, self._num_bytes = driver, feeder, num_bytes
        self._slots: list[_Slot] = []
        self._stream = 0
        self._worker = Worker(self._work, "cuda-copies")
        self._changed = threading.Condition()
        self._next_given = feeder.start_index  # guarded by _changed, as are the following
        self._closed = False
        self._borrows_since_s: float | None = None  # when the thread began to wait for a batch of the feeder

    def start(self, arena: Arena) -> None:
        """Allocate the slots and start copying; call this method once, inside the driver's `current`."""
        num_bytes = self._num_bytes
        count = max(1, min(num_slots(num_bytes), self._feeder.stop_index - self._feeder.start_index))
        self._slots = [_Slot(arena, num_bytes) for _ in range(count)]
        self._stream = arena.stream()
        self._worker.start()

    def give(
        self,
        batch_index: int,
        places: Places,
        stream: int,
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
        stopwatch: Stopwatch | None = None,
    ) -> bool:
        """Enqueue two operations on the program's stream: wait for a batch, and copy it to the program's memory.

        Args:
            batch_index: the next batch; batches are given in order, each once.
            places: the program's memory.
            stream: the program's stream.
            is_cancelled: called a few times a second while the host does not have the batch.
            stopwatch: recorded around the wait.

        Returns:
            Whether the copy was enqueued; False if the wait was cancelled.

        Raises:
            FeederError: if the batch did not reach the host in time or can never reach it.
            BaseException: whatever the source raised for this batch.
        """
        driver, slot = self._driver, self._slots[batch_index % len(self._slots)]
        if stopwatch is not None:
            driver.record(stopwatch.before, stream)
        # The index is set after the event is recorded, so it can be read without the lock.
        if slot.batch_index != batch_index and not self._wait_for(slot, batch_index, is_cancelled):
            return False
        driver.wait_for(stream, slot.arrived)
        if stopwatch is not None:
            driver.record(stopwatch.after, stream)
        if places.pixel_bytes + places.label_bytes != slot.num_bytes:
            wanted = places.pixel_bytes + places.label_bytes
            raise FeederError(f"batch {batch_index} has {slot.num_bytes} bytes, but the program takes {wanted}")
        driver.copy_on_device(places.pixels, slot.address, places.pixel_bytes, stream)
        driver.copy_on_device(places.labels, slot.address + places.pixel_bytes, places.label_bytes, stream)
        driver.record(slot.taken, stream)
        with self._changed:
            self._next_given = batch_index + 1
            self._changed.notify_all()
        return True

    def close(self) -> None:
        """Stop the thread; safe to call repeatedly. Close the ring before the feeder and the arena."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._worker.wait(_CLOSE_TIMEOUT_S)

    def _wait_for(self, slot: _Slot, batch_index: int, is_cancelled: Callable[[], bool]) -> bool:
        """Wait until the copy of a batch is enqueued; return False if the wait is cancelled."""
        asked_s = time.perf_counter()
        with self._changed:
            while slot.batch_index != batch_index:
                self._worker.check()
                if self._closed:
                    raise FeederError("the device ring was closed while the program waited for a batch")
                if is_cancelled():
                    return False
                # The time limit applies only while the thread waits for the feeder: a step on the GPU may take an hour.
                if self._borrows_since_s is not None:
                    late_s = max(asked_s, self._borrows_since_s) + self._feeder.timeout_s
                    self._feeder.check_is_in_time(batch_index, late_s)
                self._changed.wait(min(_LOOK_EVERY_S, self._feeder.timeout_s))
        return True

    def _work(self) -> None:
        """Copy each batch from the feeder to its slot; runs on the ring's thread."""
        with self._driver.current():
            self._copy_all()

    def _copy_all(self) -> None:
        in_flight: deque[tuple[int, _Slot]] = deque()
        # Fewer than the slots, because the event of a slot must still belong to the copy in flight.
        most_in_flight = min(self._feeder.most_borrowed, len(self._slots) - 1)
        for batch_index in range(self._feeder.start_index, self._feeder.stop_index):
            slot = self._slots[batch_index % len(self._slots)]
            if not self._wait_until_taken(batch_index - len(self._slots)):
                return
            self._borrows_since_s = time.perf_counter()
            block = self._feeder.borrow(batch_index, is_cancelled=self._is_closed)
            self._borrows_since_s = None
            if block is None:
                return
            self._driver.wait_for(self._stream, slot.taken)
            self._driver.copy_to_device(slot.address, block.ctypes.data, block.nbytes, self._stream)
            self._driver.record(slot.arrived, self._stream)
            slot.num_bytes = block.nbytes
            with self._changed:
                slot.batch_index = batch_index
                self._changed.notify_all()
            in_flight.append((batch_index, slot))
            if len(in_flight) > most_in_flight:
                oldest, its_slot = in_flight.popleft()
                self._driver.synchronize(its_slot.arrived)
                self._feeder.give_back(oldest)

    def _wait_until_taken(self, batch_index: int) -> bool:
        """Wait until the program has enqueued copying a batch out of its slot; return False if the ring closes."""
        with self._changed:
            # Without a time limit, because a step may take an hour; close() ends the wait.
            while not self._closed and self._next_given <= batch_index:
                self._changed.wait(_LOOK_EVERY_S)
            return not self._closed

    def _is_closed(self) -> bool:
        return self._closed
