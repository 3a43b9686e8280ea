"""The lane of one sink: its queue of records, and the thread that passes them to the sink."""

import queue
import threading
import time
from collections.abc import Callable

from loopfeed.engine.crossing.pushed import PushedHistograms, PushedImages, PushedSnapshot
from loopfeed.engine.profile.table import Profile
from loopfeed.engine.stream.sinks import (
    WRITERS,
    EvaluationProgress,
    EvaluationRecord,
    LossRecord,
    Sink,
    is_display,
    writer_of,
)
from loopfeed.preprocess.workers import Worker

# A sink this far behind (a terminal paused by Ctrl-S, a dead network disk) first slows the run, then stops it.
MOST_QUEUED = 65_536
# Nor may what is queued fill the memory with the lists of evaluations: 130 MB.
_MOST_LISTED_NUMBERS = 1 << 22
# What is large is sent only to a sink that is at most this far behind, so that it never fills the memory.
_LARGE, _MOST_BEFORE_LARGE = (PushedHistograms, PushedImages), 64
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
        is_left_out: whether it gets no more records.
        is_given_up: whether `close` does not wait for it.
        worker: the thread that passes the records.
    """

    def __init__(self, sink: Sink, keep: Callable[[BaseException, "Lane"], None]) -> None:
        self._sink, self._keep = sink, keep
        self.name = type(sink).__name__
        self.is_display = is_display(sink)
        self._writers = {kind: writer for kind in WRITERS if (writer := writer_of(sink, kind)) is not None}
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
        kind = type(record)
        if kind not in self._writers:
            return False
        if kind in _LARGE:
            return self.records.qsize() <= _MOST_BEFORE_LARGE
        if kind is not PushedSnapshot:
            return True
        if self._has_snapshot.is_set():
            getattr(self._sink, "leave_out", lambda _: None)(record)
            return False
        self._has_snapshot.set()
        return True

    def takes(self, kind: type) -> bool:
        """Return whether the sink takes records of a kind, a key of `WRITERS`."""
        return kind in self._writers

    def put(self, record: Record) -> None:
        """Queue a record that the sink accepts; called on one thread at a time."""
        self._num_listed_put += _num_listed(record)
        self.records.put(record)

    def is_behind(self) -> bool:
        """Return whether the queue exceeds one of its limits and the sink still receives records."""
        is_full = self.records.qsize() > MOST_QUEUED
        is_large = self._num_listed_put - self._num_listed_taken > _MOST_LISTED_NUMBERS
        return not self.is_left_out and (is_full or is_large)

    def is_full(self, record: Record) -> bool:
        """Return whether the queue has no place for a snapshot that the sink needs."""
        if type(record) is not PushedSnapshot or not getattr(self._sink, "needs_snapshots", False):
            return False
        return self._has_snapshot.is_set() and not self.is_left_out

    def give_up(self) -> None:
        """Abandon the sink; if it ever continues, it gets the queued records and is closed."""
        self.is_left_out = self.is_given_up = True
        self.records.put(None)

    def _write(self, record: Record) -> None:
        # A snapshot is queued with the losses, after those that a run resumed from it needs.
        self._writers[type(record)](record)
        if type(record) is PushedSnapshot:
            self._has_snapshot.clear()

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


def _num_listed(record: Record) -> int:
    return record.num_listed if isinstance(record, EvaluationRecord) else 0
