"""Meters what the batches of a feeder were waited for: the stage of reading and the file at fault.

Costs nothing for a batch that is ready. Does not depend on jax, threads or steps.
"""

import heapq
from time import perf_counter
from typing import NamedTuple

from preprocess.read_meter import AWAIT, COPY, SOURCE, STAGES, File, Profile, ReadMeter

_MOST_STALLS = 20
# A shorter wait is no stall: that much goes to waking a thread.
_LEAST_STALL_S = 1e-3
# More batches than are ever between a pull and its loss.
_MOST_CAUSES = 4096
# A batch that was ready, but not yet on the device.
_ON_ITS_WAY = Profile(tuple(float(stage == COPY) for stage in range(AWAIT)), None)


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
    """What the program's pulls waited for; `attribute` is called on one thread, all else on any.

    Args:
        readings: what the reading threads do.
        first: index of the first batch.

    Attributes:
        readings: as given.
        copy_s: seconds spent on copying batches to the program.
        wait_s: seconds that were waited for batches.
        wait_s_by_stage: these seconds by the number of the stage of reading.
        first_wait_s: seconds waited for the first batch, when nothing can be ready.
    """

    def __init__(self, readings: ReadMeter, first: int = 0) -> None:
        self.readings, self._first = readings, first
        self.copy_s = self.wait_s = self.first_wait_s = 0.0
        self.wait_s_by_stage = [0.0] * len(STAGES)
        self._waiting_for, self._waiting_since = -1, 0.0
        self._causes: dict[int, Profile] = {}
        self._stalls: list[BatchStall] = []

    @property
    def waiting(self) -> WaitNow | None:
        """What is being waited for now, None if nothing is."""
        batch_index = self._waiting_for
        return None if batch_index < 0 else WaitNow(batch_index, self._waiting_since)

    def begin_wait(self, batch_index: int) -> None:
        """Note that a batch is waited for from now on."""
        self._waiting_since, self._waiting_for = perf_counter(), batch_index

    def end_wait(self) -> None:
        """Note that the wait is over."""
        self._waiting_for = -1

    def waited(self, batch_index: int, profile: Profile) -> None:
        """Keep how a batch that was waited for was read, until `attribute` is called for it."""
        causes = self._causes
        causes[batch_index] = profile
        if len(causes) > _MOST_CAUSES:
            causes.pop(next(iter(causes)), None)

    def attribute(self, batch_index: int, wait_s: float) -> None:
        """Attribute a wait of the program for a batch to the stages in which that batch was read."""
        profile = self._causes.pop(batch_index, _ON_ITS_WAY)
        seconds, total = profile.seconds, sum(profile.seconds)
        self.wait_s += wait_s
        if batch_index == self._first:
            self.first_wait_s = wait_s
        if seconds[SOURCE] == total:
            self.wait_s_by_stage[SOURCE] += wait_s
        else:
            for stage, took in enumerate(seconds):
                self.wait_s_by_stage[stage] += wait_s * took / total
        if wait_s >= _LEAST_STALL_S:
            slowest = max(range(AWAIT), key=seconds.__getitem__)
            keep = heapq.heappush if len(self._stalls) < _MOST_STALLS else heapq.heappushpop
            keep(self._stalls, BatchStall(wait_s, batch_index, STAGES[slowest], profile.file))

    def stalls(self) -> list[BatchStall]:
        """Return the longest waits, longest first."""
        return sorted(self._stalls.copy(), key=lambda each: each.wait_s, reverse=True)
