"""Meters what the batches of a feeder were waited for: the stage of reading and the file at fault.

Costs nothing for a batch that is ready. Does not depend on jax, threads or steps.
"""

import heapq
import threading
from time import perf_counter
from typing import NamedTuple

from preprocess.read_meter import AWAIT, COPY, SOURCE, STAGES, File, Profile, ReadMeter

_MOST_STALLS = 20
# A shorter wait is no stall: that much goes to waking a thread.
_LEAST_STALL_S = 1e-3
# More batches than are ever between a pull and its loss.
_MOST_CAUSES = 4096


class BatchStall(NamedTuple):
    """A wait for one batch: its seconds, its index, the stage that took longest, and the file."""

    wait_s: float
    batch_index: int
    stage: str
    file: File


class WaitNow(NamedTuple):
    """The batch that is being waited for, and since when, by `time.perf_counter`."""

    batch_index: int
    since: float


class FeedMeter:
    """What the program's pulls waited for.

    Args:
        readings: what the reading threads do.
        first: index of the first batch.

    Attributes:
        readings: as given.
        copy_s: seconds spent on copying batches to the program.
        wait_s: seconds that were waited for batches.
        wait_s_by_stage: these seconds by the number of the stage of reading.
        first_wait_s: seconds waited for the first batch, when nothing can be ready.
        waiting: what is being waited for now.
    """

    def __init__(self, readings: ReadMeter, first: int = 0) -> None:
        self.readings, self._first = readings, first
        self.copy_s = self.wait_s = self.first_wait_s = 0.0
        self.wait_s_by_stage = [0.0] * len(STAGES)
        self.waiting: WaitNow | None = None
        self._causes: dict[int, Profile | None] = {}
        self._stalls: list[BatchStall] = []
        self._guard = threading.Lock()

    def begin_wait(self, batch_index: int) -> None:
        """Note that a batch is waited for from now on."""
        self.waiting = WaitNow(batch_index, perf_counter())

    def end_wait(self) -> None:
        """Note that the wait is over."""
        self.waiting = None

    def waited(self, batch_index: int, profile: Profile | None) -> None:
        """Keep how a batch that was waited for was read, until `attribute` is called for it."""
        causes = self._causes
        causes[batch_index] = profile
        if len(causes) > _MOST_CAUSES:
            causes.pop(next(iter(causes)), None)

    def attribute(self, batch_index: int, wait_s: float) -> None:
        """Attribute a wait of the program for a batch to the stages in which that batch was read."""
        # A batch that was ready, but on its way to the device, was copied.
        profile = self._causes.pop(batch_index, None)
        seconds = profile.seconds if profile is not None else tuple(float(stage == COPY) for stage in range(AWAIT))
        file = None if profile is None else profile.file
        total = sum(seconds)
        stage = max(range(AWAIT), key=seconds.__getitem__) if total else SOURCE
        with self._guard:
            self.wait_s += wait_s
            if batch_index == self._first:
                self.first_wait_s = wait_s
            for each, took in enumerate(seconds):
                if took:
                    self.wait_s_by_stage[each] += wait_s * took / total
            if wait_s >= _LEAST_STALL_S:
                stall = BatchStall(wait_s, batch_index, STAGES[stage], file)
                keep = heapq.heappush if len(self._stalls) < _MOST_STALLS else heapq.heappushpop
                keep(self._stalls, stall)

    def stalls(self) -> list[BatchStall]:
        """Return the longest waits, longest first."""
        with self._guard:
            return sorted(self._stalls, key=lambda each: each.wait_s, reverse=True)
