"""A sink that passes the records of a run to a logger of experiments, and outlives whatever happens to the logger.

A logger's error, a full disk, a network that is gone or a call that never returns end the logger with one warning, and
nothing else: the logger has a thread of its own, and the run never waits for it until everything else is done.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from loopfeed.engine.crossing.pushed import PushedHistograms, PushedImages
from loopfeed.engine.loggers.experiment_log import ExperimentLog, LogRefusedError
from loopfeed.engine.loggers.record_log import Logged, log_record
from loopfeed.engine.profile.table import Profile
from loopfeed.engine.stream.sinks import EvaluationRecord, LossRecord, RunDescription
from loopfeed.preprocess.workers import Worker

# Records that a slow logger may be behind; the following ones are left out.
_MOST_QUEUED = 16_384
# Of histograms and images, which are large, fewer may wait: 32 sets of images of 224 px are 77 MB.
_MOST_LARGE = 32
_LARGE = (PushedHistograms, PushedImages)
# A logger is given up if one call takes longer than this. Weights & Biases waits for its server when it opens.
_CALL_TIMEOUT_S = 120.0
# After the end of the run.
_FINISH_TIMEOUT_S = 60.0
# When the logger's thread has caught up, it sleeps for so long, because waking up for every record slows the program.
_REST_S = 0.05

type OpenLog = Callable[[RunDescription], ExperimentLog]
"""Opens a log for a run; called on the logger's thread, and may raise anything."""


class LoggerSink:
    """A sink (`loopfeed.Sink`) that logs a run with a logger of experiments, on a thread of its own.

    Numbers are named "train/…", "eval/…" and "speed/…", histograms "weights/…" and "gradients/…"; matrices that
    evaluations compute are logged as heat maps, other arrays are left out.

    Args:
        name: the logger's name in warnings.
        open_log: opens the log.
        call_timeout_s: the longest time for one call of the logger.
        finish_timeout_s: the longest time to wait for the logger once the run has ended.
    """

    is_display = True

    def __init__(
        self,
        name: str,
        open_log: OpenLog,
        *,
        call_timeout_s: float = _CALL_TIMEOUT_S,
        finish_timeout_s: float = _FINISH_TIMEOUT_S,
    ) -> None:
        self._name, self._open_log = name, open_log
        self._call_timeout_s, self._finish_timeout_s = call_timeout_s, finish_timeout_s
        self._run = RunDescription({}, {}, None, 0, None, lambda line: print(line, file=sys.stderr))
        self._guard = threading.Lock()
        self._prepare()

    def _prepare(self) -> None:
        self._records: queue.SimpleQueue[Logged | None] = queue.SimpleQueue()
        self._worker = Worker(partial(self._work, self._records), f"logger-{self._name}")
        self._is_off = self._has_left_out = False
        self._num_large_put = self._num_large_taken = 0
        self._called_at: float | None = None

    def describe_run(self, run: RunDescription) -> None:
        """Take what is known of the run; see `loopfeed.engine.stream.sinks.TakesDescription`."""
        self._run = run

    def open(self) -> None:
        """Start the logger's thread, which opens the log; a sink can be used for one run after another."""
        self._prepare()
        self._worker.start(is_attended=False)

    def write(self, record: LossRecord) -> None:
        """Log the loss of a step."""
        self._put(record)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Log an evaluation."""
        self._put(record)

    def write_histograms(self, histograms: PushedHistograms) -> None:
        """Log histograms of weights and gradients."""
        self._put(histograms)

    def write_images(self, images: PushedImages) -> None:
        """Log training images as the network saw them."""
        self._put(images)

    def write_profile(self, profile: Profile) -> None:
        """Log the tables of a profile, and the images per second of each action."""
        self._put(profile)

    def close(self) -> None:
        """Let the logger write the rest and close the log, without waiting for it."""
        self._records.put(None)

    def finish(self) -> None:
        """Wait until the log is closed, or for as long as the logger may take; Ctrl-C ends the wait."""
        deadline = time.monotonic() + self._finish_timeout_s
        try:
            while self._worker.is_at_work and not self._is_off:
                if time.monotonic() >= deadline:
                    self._end(f"it did not finish within {self._finish_timeout_s:g} s")
                    return
                self._end_if_stuck()
                self._worker.wait(0.05)
        except KeyboardInterrupt:
            self._end("it was interrupted while it finished")

    def _put(self, record: Logged) -> None:
        if self._is_off:
            return
        self._end_if_stuck()
        is_full = self._num_large_put - self._num_large_taken >= _MOST_LARGE
        if is_full and isinstance(record, EvaluationRecord):
            record = record.without_lists()
        is_large = _is_large(record)
        has_room = not is_full or not is_large
        if has_room and self._records.qsize() < _MOST_QUEUED:
            self._num_large_put += is_large
            self._records.put(record)
        elif not self._has_left_out:
            self._has_left_out = True
            self._warn("it is slower than the run: some steps are left out")

    def _end_if_stuck(self) -> None:
        called_at = self._called_at
        if called_at is not None and time.monotonic() - called_at > self._call_timeout_s:
            self._end(f"it did not answer within {self._call_timeout_s:g} s")

    def _end(self, reason: str) -> None:
        """Give the logger nothing more, and warn, once."""
        with self._guard:
            if self._is_off:
                return
            self._is_off = True
        # What is queued would stay in memory as long as the logger hangs.
        with suppress(queue.Empty):
            while True:
                self._records.get_nowait()
        self._records.put(None)
        self._warn(f"{reason}: nothing more is logged there; the run is not affected")

    def _warn(self, text: str) -> None:
        # The output may be closed; the run ends for its own reasons then.
        with suppress(Exception):
            self._run.notify(f"warning: {self._name}: {text}")

    def _work(self, records: "queue.SimpleQueue[Logged | None]") -> None:
        log: ExperimentLog | None = None
        try:
            log, last_step = self._call(partial(self._open_log, self._run)), self._run.step
            while (record := records.get()) is not None:
                if isinstance(record, LossRecord):
                    last_step = record.step
                self._num_large_taken += _is_large(record)
                self._call(partial(log_record, log, record, last_step, self._run.classes))
                if records.empty():
                    self._call(log.flush)
                    time.sleep(_REST_S)
            self._call(log.close)
        except BaseException as error:  # noqa: BLE001 - whatever it was, only the logger ends
            reason = " ".join(str(error).split())
            if records is self._records:  # else the sink logs another run by now
                kind = "" if isinstance(error, LogRefusedError) else type(error).__name__
                self._end(": ".join(filter(None, (kind, reason))))
            if log is not None:
                with suppress(BaseException):
                    log.close()

    def _call[T](self, function: Callable[[], T]) -> T:
        self._called_at = time.monotonic()
        try:
            return function()
        finally:
            self._called_at = None


def _is_large(record: Logged) -> bool:
    return isinstance(record, _LARGE) or (isinstance(record, EvaluationRecord) and record.num_listed > 0)
