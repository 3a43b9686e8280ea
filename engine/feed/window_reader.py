"""Two windows of images in memory: while batches are taken from one, the next is read.

Owns the memory, the reading threads and the moment at which a window is given up; the order itself is
`loopfeed.engine.feed.order`'s. Does not depend on jax. A window is read in large contiguous parts. An error of
the split is kept, and raised to whoever takes images of that window.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.feed.batches import Labels, Pixels
from loopfeed.engine.feed.order import WindowedOrder
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.read_meter import AWAIT, COPY, NO_PROFILE, READ, WINDOW, Profile
from loopfeed.preprocess.shards.reader import ShardError, ShardSplit
from loopfeed.preprocess.workers import Worker, wait_for

# Parts of this size hide a latency of 100 ms if several are read at a time.
_PART_BYTES = 8 << 20
# At least this many threads read from a store; they mostly wait for it.
_LEAST_STORE_READERS = 16
# Larger shards are read in parts before their copies are there.
_MOST_AWAITED_BYTES = 128 << 20
# How often a wait checks whether its time is over.
_LOOK_EVERY_S = 0.25
# How long `close` waits for all threads together: stalled storage may block all of them.
_CLOSE_TIMEOUT_S = 1.0
NUM_WINDOWS = 2
"""The number of windows in memory."""


class _Part(NamedTuple):
    """Images `start` … `stop` - 1 of the split, and the row of the window's memory to read the first one into."""

    start: int
    stop: int
    row: int


@dataclass(eq=False)
class _Window:
    """A window in memory.

    Attributes:
        number: number of the window.
        start: its first position.
        rows: int64 [n], the row in memory of each of its positions; -1 for those of other processes.
        memory: index of its memory.
        parts: the parts that no thread has begun to read.
        num_unread: number of parts that are not read completely.
        num_left: number of positions that are still to be taken.
        num_takers: number of threads that copy images from it.
        failure: the error of a part.
        seconds: the seconds that its stages of reading took so far, by number, summed over the threads.
        slowest: the part that took longest.
    """

    number: int
    start: int
    rows: NDArray[np.int64]
    memory: int
    parts: deque[_Part]
    num_unread: int
    num_left: int
    num_takers: int = 0
    failure: BaseException | None = None
    seconds: list[float] = field(default_factory=lambda: [0.0] * AWAIT)
    slowest: Profile = NO_PROFILE

    def add(self, profile: Profile) -> None:
        """Add the times of a part that was read."""
        self.seconds = [sum(pair) for pair in zip(self.seconds, profile.seconds, strict=True)]
        self.slowest = max(self.slowest, profile, key=lambda each: sum(each.seconds))

    @property
    def profile(self) -> Profile:
        """The times of its parts, and the file that took longest."""
        return Profile(tuple(self.seconds), self.slowest.file)


@dataclass(eq=False)
class _Memory:
    """Room for the images of a window, allocated when it is first used: the pixels and labels, by row."""

    pixels: Pixels
    labels: Labels
    window: _Window | None = field(default=None)


class WindowReader:
    """Reads the images of one process, window after window, ahead of those who take them.

    Args:
        split: the split; it stays open until `close`.
        order: the order of its images.
        rows: the rows of every batch that are taken, consecutive.
        first_position: the first position that is taken, a multiple of the batch.
        num_threads: threads that read a local split; a store is read by 16 at least.
        timeout_s: longest time for one part, in seconds.
    """

    def __init__(
        self,
        split: ShardSplit,
        order: WindowedOrder,
        *,
        rows: range,
        first_position: int,
        num_threads: int,
        timeout_s: float,
    ) -> None:
        self._split, self._order, self._rows = split, order, rows
        self._first_position, self._timeout_s = first_position, timeout_s
        is_stored = split.location.local_path is None
        self._num_threads = max(num_threads, _LEAST_STORE_READERS) if is_stored else num_threads
        self._part_images = max(1, _PART_BYTES // split.manifest.image_bytes)
        # If there is a cache, images are read from the copies of their shards, so that nothing is read twice.
        self._shard_images = split.manifest.shard_images
        is_short = split.copies is not None and split.copies.shard_bytes <= _MOST_AWAITED_BYTES
        self._copies = split.copies if is_short else None
        most_rows = (-(-order.largest_window // order.batch) + 1) * len(order.lanes_of(rows)) * order.lane_rows
        self._capacity = min(order.largest_window, most_rows)
        self._memory: list[_Memory] = []
        self._workers: list[Worker[None]] = []
        self._changed = threading.Condition()  # guards everything below, and `_memory`
        self._next_window = order.window_at(first_position)
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """The number of bytes of host memory that the windows occupy."""
        return NUM_WINDOWS * self._capacity * stored_bytes(self._split)

    def take(self, start: int, stop: int, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Copy the images at positions `start` … `stop` - 1 of one window, in rows of this reader, and their labels.

        Take each position once, about in order: the images of a window that was given up are read one by one.

        Args:
            start, stop: half-open range of positions.
            pixels, labels: uint32 [n, H, row_words] and int32 [n, *label_row] of the split; written.
            timeout_s: longest wait, in seconds.

        Raises:
            ShardError: the window was not read in time, or the reader is closed.
            BaseException: whatever the split raised while it read the window.
        """
        window, reading = None, self._split.meter.here()
        if start >= self._first_position:
            before = reading.enter(AWAIT)
            window = self._await(self._order.window_at(start), time.monotonic() + timeout_s, timeout_s)
            wait_s = time.perf_counter() - reading.since
            reading.enter(before)
            if window is not None:
                reading.blame(window.profile, wait_s)
        if window is None:
            images = self._order.images_at(np.arange(start, stop, dtype=np.int64))
            self._split.read_into(images, pixels, labels, timeout_s=timeout_s)
            return
        memory = self._memory[window.memory]
        rows = window.rows[start - window.start : stop - window.start]
        before = reading.enter(COPY)
        try:
            # With "clip", `take` writes into the buffers directly.
            np.take(memory.pixels, rows, axis=0, out=pixels, mode="clip")
            np.take(memory.labels, rows, axis=0, out=labels, mode="clip")
        finally:
            reading.enter(before)
            self._return(window, stop - start)

    def close(self) -> None:
        """Stop reading; threads that read a part end when it is read."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        wait_for(self._workers, _CLOSE_TIMEOUT_S)

    def _await(self, number: int, deadline: float, timeout_s: float) -> _Window | None:
        """Return the window once it is read, with one more taker; None if it was given up."""
        with self._changed:
            self._start()
            while True:
                window = self._find(number)
                if window is not None and window.failure is not None:
                    raise window.failure
                if window is not None and not window.num_unread:
                    window.num_takers += 1
                    return window
                if window is None and number < self._next_window:
                    return None
                if self._closed:
                    raise ShardError(f"{self._name()}: the reader was closed while a batch waited for its window")
                if time.monotonic() >= deadline:
                    num_unread = None if window is None else quantity(window.num_unread, "part")
                    done = "before it could be read" if num_unread is None else f"with {num_unread} unread"
                    raise ShardError(
                        f"{self._name()}: a window of {quantity(self._capacity, 'image')} was not ready within "
                        f"{timeout_s:g} s, {done}: check the storage, raise --infeed-timeout, or start the run with a "
                        "smaller --window-gb"
                    )
                self._changed.wait(min(_LOOK_EVERY_S, max(0.0, deadline - time.monotonic())))

    def _return(self, window: _Window, num_taken: int) -> None:
        """Note that images were taken; after the last one, the window's memory is used for another."""
        with self._changed:
            window.num_left -= num_taken
            window.num_takers -= 1
            if window.num_left <= 0 and not window.num_takers:
                self._memory[window.memory].window = None
                self._open_windows()

    def _find(self, number: int) -> _Window | None:
        windows = (memory.window for memory in self._memory)
        return next((each for each in windows if each is not None and each.number == number), None)

    def _start(self) -> None:
        """Allocate the memory and start the threads, once."""
        if self._memory or self._closed:
            return
        split = self._split
        for _ in range(NUM_WINDOWS):
            # The system provides pages only as they are written.
            pixels = np.empty((self._capacity, split.height, split.row_words), np.uint32)
            self._memory.append(_Memory(pixels, np.empty((self._capacity, *split.label_row), np.int32)))
        self._open_windows()
        for number in range(self._num_threads):
            self._workers.append(Worker(self._work, f"window-{number}").start(is_attended=False))

    def _open_windows(self) -> None:
        """Let the threads read the next windows into memory that is free."""
        for index, memory in enumerate(self._memory):
            while memory.window is None and not self._closed:
                memory.window = self._plan(self._next_window, index)
                self._next_window += 1
        self._changed.notify_all()

    def _plan(self, number: int, memory: int) -> _Window | None:
        """Return a window that is still to be read into this memory; None if nothing of it is taken here."""
        order = self._order
        start, stop = order.bounds(number)
        positions = np.arange(max(start, self._first_position), stop) % order.batch
        num_user = np.count_nonzero((positions >= self._rows.start) & (positions < self._rows.stop))
        if not num_user:
            return None
        places = order.places_of(number, self._rows)
        memory_rows = np.full(stop - start, -1)
        memory_rows[places] = np.arange(len(places))
        parts = deque(self._parts(order.images_at_places(number, places)))
        if self._copies is not None:
            self._copies.request(self._shards_of(parts))
        return _Window(number, start, memory_rows[order.places(number)], memory, parts, len(parts), int(num_user))

    def _parts(self, images: NDArray[np.int64]) -> Iterator[_Part]:
        """Yield the contiguous parts of images, int64 [n], none of them too large."""
        edges = np.flatnonzero(np.diff(images, prepend=-2) != 1).tolist()
        for first, last in zip(edges, [*edges[1:], len(images)], strict=True):
            for row in range(first, last, self._part_images):
                start = int(images[row])
                yield _Part(start, start + min(self._part_images, last - row), row)

    def _work(self) -> None:
        """Read parts of windows until the reader is closed; runs on each thread."""
        reading = self._split.meter.join()
        while (claimed := self._claim()) is not None:
            window, part = claimed
            memory = self._memory[window.memory]
            rows = slice(part.row, part.row + part.stop - part.start)
            failure: BaseException | None = None
            reading.begin(WINDOW)
            reading.visit((part.start // self._shard_images, 1))
            try:
                self._await_copies(part)
                images = np.arange(part.start, part.stop, dtype=np.int64)
                self._split.read_into(images, memory.pixels[rows], memory.labels[rows], timeout_s=self._timeout_s)
            except BaseException as error:  # noqa: BLE001 - raised, with its traceback, to those who take images
                failure = error
            profile = reading.end()
            with self._changed:
                window.add(profile)
                window.num_unread -= 1
                if failure is not None:
                    window.failure = window.failure or failure
                    window.parts.clear()
                if failure is not None or not window.num_unread:
                    self._changed.notify_all()

    def _await_copies(self, part: _Part) -> None:
        if self._copies is not None:
            before = (reading := self._split.meter.here()).enter(READ)
            for shard in self._shards_of([part]):
                self._copies.wait(shard, timeout_s=self._timeout_s)
            reading.enter(before)

    def _shards_of(self, parts: Iterable[_Part]) -> list[int]:
        """Return the numbers of the shards of parts, in the order of the parts."""
        size = self._shard_images
        return list(
            dict.fromkeys(shard for part in parts for shard in range(part.start // size, (part.stop - 1) // size + 1))
        )

    def _claim(self) -> tuple[_Window, _Part] | None:
        """Return the next part of the earliest window that has one; None once the reader is closed."""
        with self._changed:
            while not self._closed:
                windows = [memory.window for memory in self._memory if memory.window is not None]
                for window in sorted(windows, key=lambda each: each.number):
                    if window.parts:
                        return window, window.parts.popleft()
                # Without a time limit, because a window may be used for hours; `close` ends the wait.
                self._changed.wait()
        return None

    def _name(self) -> str:
        return self._split.location.display.rstrip("/")


def stored_bytes(split: ShardSplit) -> int:
    """Return the bytes of host memory for an image of a split and its label."""
    return split.manifest.image_bytes + 4 * math.prod(split.label_row)
