"""Meters what the threads that read a split do: how long each stage takes, and what each thread does now.

A transition between stages costs about 0.1 µs. Knows nothing of what is read or of batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from loopfeed.preprocess.quantities import quantity

STAGES = ("source", "open", "read", "check", "copy")
"""The stages of reading, by number."""
SOURCE, OPEN, READ, CHECK, COPY = range(len(STAGES))
AWAIT, IDLE = len(STAGES), len(STAGES) + 1
"""Two more: waiting for other reading threads, and for work."""
WINDOW = -2
"""Stands for the number of a batch where a window of many batches is read."""

type File = str | tuple[int, int] | None
"""A path; or, of files that are read together, the number of the first shard and how many there are; or none."""


class Profile(NamedTuple):
    """How long the stages of one piece of work took, in seconds by number, and which file took longest."""

    seconds: tuple[float, ...]
    file: File


NO_PROFILE = Profile((0.0,) * AWAIT, None)
"""The profile of no work."""


class Reading:
    """What one thread reads. Only that thread changes it; any thread may look at it.

    Attributes:
        thread: the name of the thread.
        work: the number of the batch that it prepares; -1 if it is none, or `WINDOW`.
        stage: the number of the stage.
        since: when the stage began, by `time.perf_counter`.
        file: what it reads.
        totals: the seconds of all stages but `IDLE` so far, by number, without those of the current work.
        num_bytes: bytes of images read so far.
    """

    __slots__ = (
        "_blamed",
        "_has_stages",
        "_seconds",
        "_slowest",
        "_slowest_s",
        "_visited",
        "file",
        "num_bytes",
        "since",
        "stage",
        "thread",
        "totals",
        "work",
    )

    def __init__(self) -> None:
        self.thread = threading.current_thread().name
        self.work, self.stage, self.since = -1, IDLE, perf_counter()
        self.file: File = None
        self.totals = [0.0] * IDLE
        self.num_bytes = 0
        self._seconds, self._blamed = [0.0] * (IDLE + 1), [0.0] * len(STAGES)
        self._has_stages = False
        self._slowest: File = None
        self._slowest_s = self._visited = 0.0

    def begin(self, work: int) -> None:
        """Begin a piece of work, in the stage `SOURCE`."""
        if self._has_stages:
            self.file, self._slowest, self._slowest_s = None, None, 0.0
            self._has_stages, self._seconds = False, [0.0] * (IDLE + 1)
        self.work, self.stage, self.since = work, SOURCE, perf_counter()

    def enter(self, stage: int) -> int:
        """Enter a stage, and return the one before."""
        now, before = perf_counter(), self.stage
        self._has_stages = True
        self._seconds[before] += now - self.since
        self.stage, self.since = stage, now
        return before

    def visit(self, file: File) -> None:
        """Note that another file is read from now on."""
        now, self._has_stages = perf_counter(), True
        if self.file is not None and now - self._visited > self._slowest_s:
            self._slowest, self._slowest_s = self.file, now - self._visited
        self.file, self._visited = file, now

    def blame(self, profile: Profile, wait_s: float) -> None:
        """Attribute a wait for other threads to the stages that these took."""
        total = sum(profile.seconds)
        for stage, seconds in enumerate(profile.seconds):
            self._blamed[stage] += wait_s * (seconds / total if total else stage == READ)
        if wait_s > self._slowest_s:
            self._slowest, self._slowest_s = profile.file, wait_s

    def end(self) -> Profile:
        """End the piece of work, and return how long it took."""
        if not self._has_stages:
            # A function for batches: this costs a third.
            took = perf_counter() - self.since
            self.work, self.stage = -1, IDLE
            self.totals[SOURCE] += took
            return Profile((took, 0.0, 0.0, 0.0, 0.0), None)
        self.enter(IDLE)
        if self.file is not None:
            self.visit(None)
        self.work, seconds, totals = -1, self._seconds, self.totals
        for stage in range(IDLE):
            totals[stage] += seconds[stage]
        if not seconds[AWAIT]:
            return Profile(tuple(seconds[:AWAIT]), self._slowest)
        blamed, self._blamed = self._blamed, [0.0] * len(STAGES)
        return Profile(tuple(map(sum, zip(seconds[:AWAIT], blamed, strict=True))), self._slowest)


class ReadMeter:
    """The readings of all threads that read one source.

    Args:
        name_shard: returns the name of a shard's file by its number.
    """

    def __init__(self, name_shard: Callable[[int], str] = str) -> None:
        self._name_shard = name_shard
        self._readings: dict[int, Reading] = {}
        self._past: list[Reading] = []

    def join(self) -> Reading:
        """Return a new reading of this thread; called when it begins, as the system gives numbers of threads again."""
        ident = threading.get_ident()
        before, self._readings[ident] = self._readings.get(ident), Reading()
        if before is not None:
            self._past.append(before)
        return self._readings[ident]

    def here(self) -> Reading:
        """Return the reading of this thread."""
        found = self._readings.get(threading.get_ident())
        return self.join() if found is None else found

    def name(self, file: File) -> str | None:
        """Return the name of what is read, for messages; None if it is no file."""
        if file is None or isinstance(file, str):
            return file
        first, count = file
        return self._name_shard(first) + (f" and {quantity(count - 1, 'other')}" if count > 1 else "")

    def all(self) -> list[Reading]:
        """Return the readings of all threads that ever read."""
        return [*self._past, *self._readings.values()]
