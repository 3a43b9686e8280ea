"""Batches on the device ahead of the program, copied there while it computes.

A thread takes each batch from the feeder's page-locked memory and enqueues its copy to one of a few slots on the
device, on a stream of its own; the program's stream then waits for the copy's event and takes the batch from the slot.
All order is the events': nobody sleeps, and no thread waits for a copy before it enqueues the next.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from engine.crossing.cuda.arena import Arena
from engine.crossing.cuda.driver import CudaDriver
from engine.feed.feeder import Feeder, FeederError

# As many batches as these bytes hold, within bounds: two keep the copies going while one is taken, and a step of a
# small network is over before a thread is woken.
_SLOTS_BYTES = 64 << 20
_LEAST_SLOTS, _MOST_SLOTS = 3, 16
_LOOK_EVERY_S = 0.25
_CLOSE_TIMEOUT_S = 5.0


def num_slots(batch_bytes: int) -> int:
    """How many batches of a size are held on the device."""
    return max(_LEAST_SLOTS, min(_MOST_SLOTS, _SLOTS_BYTES // batch_bytes))


class Places(NamedTuple):
    """Where the program wants a batch.

    Attributes:
        pixels, labels: addresses on the device.
    """

    pixels: int
    labels: int


class Stopwatch(NamedTuple):
    """Events that tell how long a stream waited for a batch.

    Attributes:
        before, after: with timing.
    """

    before: int
    after: int


class _Slot:
    """Memory of one batch on the device; `arrived` passes when it is filled, `taken` when it was copied out."""

    def __init__(self, arena: Arena, num_bytes: int) -> None:
        self.address = arena.device(num_bytes)
        self.arrived, self.taken = arena.event(), arena.event()
        self.batch_index = -1  # of the batch that was enqueued last


class DeviceRing:
    """Copies the batches of a feeder, in order, each once.

    Args:
        driver: of the device.
        feeder: started, with page-locked memory; read from by this ring alone.
        pixel_bytes, label_bytes: of a batch.
    """

    def __init__(self, driver: CudaDriver, feeder: Feeder, *, pixel_bytes: int, label_bytes: int) -> None:
        self._driver, self._feeder = driver, feeder
        self._pixel_bytes, self._label_bytes = pixel_bytes, label_bytes
        self._slots: list[_Slot] = []
        self._stream = 0
        self._thread = threading.Thread(target=self._work, name="cuda-copies", daemon=True)
        self._changed = threading.Condition()
        self._next_given = feeder.start_index  # guarded, like the rest
        self._closed = False
        self._borrows_since_s: float | None = None  # the thread waits for the host to have a batch
        self._failure: BaseException | None = None

    def start(self, arena: Arena) -> None:
        """Takes memory and begins to copy; called once, inside the driver's `current`."""
        num_bytes = self._pixel_bytes + self._label_bytes
        count = max(1, min(num_slots(num_bytes), self._feeder.stop_index - self._feeder.start_index))
        self._slots = [_Slot(arena, num_bytes) for _ in range(count)]
        self._stream = arena.stream()
        self._thread.start()

    def give(
        self,
        batch_index: int,
        places: Places,
        stream: int,
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
        stopwatch: Stopwatch | None = None,
    ) -> bool:
        """Enqueues on the program's stream the wait for a batch, and its copy to where the program wants it.

        Args:
            batch_index: its turn: batches are given in order, each once.
            places: the program's memory.
            stream: the program's.
            is_cancelled: asked a few times a second while the host does not have the batch.
            stopwatch: recorded around the wait.

        Returns:
            Whether the batch is coming; False where the wait was cancelled, nothing then being enqueued.

        Raises:
            FeederError: where the host did not have the batch in time or never can.
            BaseException: whatever the source raised for this batch.
        """
        driver, slot = self._driver, self._slots[batch_index % len(self._slots)]
        if stopwatch is not None:
            driver.record(stopwatch.before, stream)
        # Set behind the record that it tells of: no lock is needed to see it.
        if slot.batch_index != batch_index and not self._wait_for(slot, batch_index, is_cancelled):
            return False
        driver.wait_for(stream, slot.arrived)
        if stopwatch is not None:
            driver.record(stopwatch.after, stream)
        driver.copy_on_device(places.pixels, slot.address, self._pixel_bytes, stream)
        driver.copy_on_device(places.labels, slot.address + self._pixel_bytes, self._label_bytes, stream)
        driver.record(slot.taken, stream)
        with self._changed:
            self._next_given = batch_index + 1
            self._changed.notify_all()
        return True

    def close(self) -> None:
        """Ends the thread; may be called again. The feeder must be closed after it, the arena too."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _wait_for(self, slot: _Slot, batch_index: int, is_cancelled: Callable[[], bool]) -> bool:
        """Waits until the copy of a batch is enqueued, giving True, or cancelled, giving False."""
        asked_s = time.perf_counter()
        with self._changed:
            while slot.batch_index != batch_index:
                if self._failure is not None:
                    raise self._failure
                if self._closed:
                    raise FeederError("the ring of the device was closed while the program waited for a batch")
                if is_cancelled():
                    return False
                # While the thread waits for the card, as a step may take an hour, nothing is late.
                if self._borrows_since_s is not None:
                    late_s = max(asked_s, self._borrows_since_s) + self._feeder.timeout_s
                    self._feeder.check_is_in_time(batch_index, late_s)
                self._changed.wait(min(_LOOK_EVERY_S, self._feeder.timeout_s))
        return True

    def _work(self) -> None:
        """The thread's life: each batch from the feeder to its slot."""
        try:
            with self._driver.current():
                self._copy_all()
        except BaseException as error:  # noqa: BLE001 - raised to whoever takes this batch, traceback included
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _copy_all(self) -> None:
        under_way: deque[tuple[int, _Slot]] = deque()
        # Fewer than there are slots, whose events tell of them.
        most_under_way = min(self._feeder.most_borrowed, len(self._slots) - 1)
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
            with self._changed:
                slot.batch_index = batch_index
                self._changed.notify_all()
            under_way.append((batch_index, slot))
            if len(under_way) > most_under_way:
                oldest, its_slot = under_way.popleft()
                self._driver.synchronize(its_slot.arrived)
                self._feeder.give_back(oldest)

    def _wait_until_taken(self, batch_index: int) -> bool:
        """Waits until the program has enqueued the copy out of a slot, however long; False where the ring closes."""
        with self._changed:
            # It ends with close(), and a program may take an hour over a step.
            while not self._closed and self._next_given <= batch_index:
                self._changed.wait(_LOOK_EVERY_S)
            return not self._closed

    def _is_closed(self) -> bool:
        return self._closed
