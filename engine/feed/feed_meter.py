"""Meters what the batches of a feeder were waited for: the stage of reading and the file at fault.

Costs nothing for a batch that is ready. Does not depend on jax, threads or steps.
"""

import heapq
import threading
from typing import NamedTuple

from loopfeed.preprocess.read_meter import AWAIT, COPY, SOURCE, STAGES, WINDOW, File, Profile, Reading, ReadMeter

MOST_STALLS = 20
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
    """What the program's pulls waited for; safe from any thread.

    Args:
        readings: what the reading threads do.
        first: index of the first batch.

    Attributes:
        readings: as given.
        waiting: what is being waited for now, None if nothing is; set by the feeder.
        copy_s: seconds spent on copying batches to the program; of several shards, for the first.
        wait_s_by_stage: seconds that were waited for batches, also in vain, by the number of the stage of reading; what
            several shards waited at once counts once.
        first_wait_s: seconds waited for the first batch, when nothing can be ready.
    """

    def __init__(self, readings: ReadMeter, first: int = 0) -> None:
        self.readings, self._first = readings, first
        self.copy_s = self.first_wait_s = 0.0
        self.wait_s_by_stage = [0.0] * len(STAGES)
        self.waiting: WaitNow | None = None
        self._guard, self._booked_until = threading.Lock(), 0.0
        self._causes: dict[int, Profile] = {}
        self._stalls: list[BatchStall] = []

    @property
    def wait_s(self) -> float:
        """Seconds that were waited for batches."""
        return sum(self.wait_s_by_stage)

    def waited(self, batch_index: int, since: float, until: float, profile: Profile | None) -> None:
        """Attribute a shard's wait for its part of a batch.

        Args:
            batch_index: the batch that was waited for.
            since, until: when the wait began and ended, by `time.perf_counter`.
            profile: how the batch was read; None if it did not arrive, because the wait failed or was cancelled.
        """
        profile = self._profile_now(batch_index) if profile is None else profile
        with self._guard:
            wait_s = until - max(since, self._booked_until)
            self._booked_until = max(until, self._booked_until)
            if wait_s > 0:
                self._book(batch_index, wait_s, profile)

    def busy(self, batch_index: int) -> Reading | None:
        """Return the reading of the thread that prepares a batch now, or a window of many; None if there is none."""
        readings = [each for each in self.readings.all() if each.stage < AWAIT]
        busy = [each for each in readings if each.work == batch_index]
        busy = busy or [each for each in readings if each.work == WINDOW]
        return min(busy, key=lambda each: each.since, default=None)

    def _profile_now(self, batch_index: int) -> Profile:
        reading = self.busy(batch_index)
        stage, file = (SOURCE, None) if reading is None else (reading.stage, reading.file)
        return Profile(tuple(float(each == stage) for each in range(AWAIT)), file)

    def keep_cause(self, batch_index: int, profile: Profile) -> None:
        """Keep how a batch that was waited for was read, until `attribute` is called for it."""
        causes = self._causes
        causes[batch_index] = profile
        if len(causes) > _MOST_CAUSES:
            causes.pop(next(iter(causes)), None)

    def attribute(self, batch_index: int, wait_s: float) -> None:
        """Attribute a wait of the program for a batch to the stages in which that batch was read."""
        profile = self._causes.pop(batch_index, _ON_ITS_WAY)
        with self._guard:
            self._book(batch_index, wait_s, profile)

    def _book(self, batch_index: int, wait_s: float, profile: Profile) -> None:
        seconds, total = profile.seconds, sum(profile.seconds)
        if batch_index == self._first:
            self.first_wait_s += wait_s
        if seconds[SOURCE] == total:
            self.wait_s_by_stage[SOURCE] += wait_s
        else:
            for stage, took in enumerate(seconds):
                self.wait_s_by_stage[stage] += wait_s * took / total
        if wait_s >= _LEAST_STALL_S:
            slowest = max(range(AWAIT), key=seconds.__getitem__)
            keep = heapq.heappush if len(self._stalls) < MOST_STALLS else heapq.heappushpop
            keep(self._stalls, BatchStall(wait_s, batch_index, STAGES[slowest], profile.file))

    def stalls(self) -> list[BatchStall]:
        """Return the longest waits, longest first."""
        return sorted(self._stalls.copy(), key=lambda each: each.wait_s, reverse=True)
