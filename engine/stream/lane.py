"""The lane of one sink: its queue of records, and the thread that passes them to the sink."""

import queue
import threading
import time
from collections.abc import Callable

from loopfeed.engine.crossing.pushed import PushedHistograms, PushedImages, PushedSnapshot
from loopfeed.engine.profile.table import Profile
from loopfeed.engine.stream.sinks import (
    Display,
    EvaluationProgress,
    EvaluationRecord,
    LossRecord,
    NeedsSnapshots,
    ShowsProgress,
    Sink,
    TakesHistograms,
    TakesImages,
    TakesProfile,
    TakesSnapshots,
)
from loopfeed.preprocess.workers import Worker

# A sink this far behind (a terminal paused by Ctrl-S, a dead network disk) first slows the run, then stops it.
MOST_QUEUED = 65_536
# Nor may what is queued fill the memory with the lists of evaluations: 130 MB.
_MOST_LISTED_NUMBERS = 1 << 22
# Histograms and images are sent only to a sink that is at most this far behind, so that they never fill the memory.
_MOST_BEFORE_LARGE = 64
# How long a sink's thread sleeps when it has caught up. Waking up for every record would cost a fast program more than
# its step, because the threads contend for the GIL.
_REST_S = 0.002

type Record = (
    LossRecord | EvaluationRecord | EvaluationProgress | PushedSnapshot | PushedHistograms | PushedImages | Profile
)
"""What a sink can get."""


class Lane:
    """A sink, its queue of records, and the thread that passes them to the sink.

    Args:
        sink: the sink, open.
        keep: called with the sink's exception, and this lane.

    Attributes:
        records: the queue, with None at the end; unbounded, because the program's last records must have room.
        num_taken: number of records that the sink has accepted.
        is_display: whether the sink only shows the run, which goes on without it.
        shows_progress: whether the sink shows the progress of evaluations.
        takes_profile: whether the sink takes the profile of the launch.
        is_left_out: whether it gets no more records.
        is_given_up: whether `close` does not wait for it.
        worker: the thread that passes the records.
    """

    def __init__(self, sink: Sink, keep: Callable[[BaseException, "Lane"], None]) -> None:
        self._sink, self._keep = sink, keep
        self.name = type(sink).__name__
        self.is_display = is_display(sink)
        self.shows_progress, self.takes_profile = isinstance(sink, ShowsProgress), isinstance(sink, TakesProfile)
        self.records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self.num_taken = 0
        self._num_listed_put = self._num_listed_taken = 0
        self.is_left_out = self.is_given_up = False
        self._has_snapshot = threading.Event()
        self.worker = Worker(self._work, f"loss-stream-{self.name}")

    def accepts(self, record: Record) -> bool:
        """Return whether to queue a record; snapshots are queued one at a time, and only for sinks that take them.

        A sink that lags behind misses histograms and images, which are large.
        """
        if isinstance(record, PushedHistograms | PushedImages):
            wanted = TakesHistograms if isinstance(record, PushedHistograms) else TakesImages
            return isinstance(self._sink, wanted) and self.records.qsize() <= _MOST_BEFORE_LARGE
        if not isinstance(record, PushedSnapshot):
            return True
        if not isinstance(self._sink, TakesSnapshots):
            return False
        if self._has_snapshot.is_set():
            self._sink.leave_out(record)
            return False
        self._has_snapshot.set()
        return True

    def put(self, record: Record) -> None:
        """Queue a record that the sink accepts; called on one thread at a time."""
        self._num_listed_put += _num_listed(record)
        self.records.put(record)

    @property
    def most_queued(self) -> int:
        """The limit of the queue."""
        return MOST_QUEUED

    def is_behind(self) -> bool:
        """Return whether the queue exceeds one of its limits and the sink still receives records."""
        is_full = self.records.qsize() > self.most_queued
        is_large = self._num_listed_put - self._num_listed_taken > _MOST_LISTED_NUMBERS
        return not self.is_left_out and (is_full or is_large)

    def is_full(self, record: Record) -> bool:
        """Return whether the queue has no place for a snapshot that the sink needs."""
        is_needed = isinstance(self._sink, NeedsSnapshots) and self._sink.needs_snapshots
        return is_needed and isinstance(record, PushedSnapshot) and self._has_snapshot.is_set() and not self.is_left_out

    def give_up(self) -> None:
        """Abandon the sink; if it ever continues, it gets the queued records and is closed."""
        self.is_left_out = self.is_given_up = True
        self.records.put(None)

    def _write(self, record: Record) -> None:
        if isinstance(record, EvaluationRecord):
            self._sink.write_evaluation(record)
        elif isinstance(record, LossRecord):
            self._sink.write(record)
        elif not isinstance(record, PushedSnapshot):
            self._write_optional(record)
        elif isinstance(self._sink, TakesSnapshots):
            # Queued with the losses, after those that a run resumed from this snapshot needs.
            self._sink.write_snapshot(record)
            self._has_snapshot.clear()

    def _write_optional(self, record: EvaluationProgress | PushedHistograms | PushedImages | Profile) -> None:
        sink = self._sink
        if isinstance(record, EvaluationProgress):
            if isinstance(sink, ShowsProgress):
                sink.write_progress(record)
        elif isinstance(record, PushedHistograms):
            if isinstance(sink, TakesHistograms):
                sink.write_histograms(record)
        elif isinstance(record, PushedImages):
            if isinstance(sink, TakesImages):
                sink.write_images(record)
        elif isinstance(sink, TakesProfile):
            sink.write_profile(record)

    def _work(self) -> None:
        try:
            while (record := self.records.get()) is not None:
                self._write(record)
                self.num_taken += 1
                self._num_listed_taken += _num_listed(record)
                if self.records.empty():
                    time.sleep(_REST_S)
        except BaseException as error:  # noqa: BLE001 - kept for the caller; the other sinks continue, whatever it was
            self.is_left_out = True
            self._keep(error, self)
        try:
            self._sink.close()
        except BaseException as error:  # noqa: BLE001 - raised on the caller's thread, once the other sinks are closed
            self._keep(error, self)


def is_display(sink: Sink) -> bool:
    """Return whether the result of the run does not depend on a sink."""
    return isinstance(sink, Display) and sink.is_display


def _num_listed(record: Record) -> int:
    return record.num_listed if isinstance(record, EvaluationRecord) else 0
