"""A sink that passes the records of a run to a logger of experiments, and outlives whatever happens to the logger.

A logger's error, a full disk, a network that is gone or a call that never returns end the logger with one warning, and
nothing else: the logger has a thread of its own, and the run never waits for it until everything else is done.

Owns what a logger shows of each record of a run, under which names, and as which pictures.
"""

import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from loopfeed.engine.crossing.pushed import PushedHistograms, PushedImages
from loopfeed.engine.loggers.experiment_log import Cell, ExperimentLog, LogRefusedError, Moment, Table
from loopfeed.engine.profile.table import Profile, ProfileRow, ScopeRow
from loopfeed.engine.stream.sinks import EvaluationRecord, LossRecord, RunDescription
from loopfeed.preprocess.commands.contact_sheet import Geometry, draw_sheet
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.workers import Worker

_FRAME = (160, 160, 160)
_GAP, _LINE = 8, 15
_LEAST_SHARE = 0.005
# Smaller images and matrices are enlarged by whole factors, so that they can be seen and read.
_LEAST_SIDE = 112
_LEAST_MAP_SIDE = 320
MOST_MAP_SIDE = 1024
"""The most rows or columns of a matrix that is drawn."""

type Logged = LossRecord | EvaluationRecord | PushedHistograms | PushedImages | Profile
"""A record that loggers take."""


def log_record(log: ExperimentLog, record: Logged, last_step: int, classes: tuple[str, ...] | None) -> None:
    """Write one record of a run to an open log.

    Args:
        log: the log.
        record: the record.
        last_step: the step of the last loss.
        classes: readable names of the classes, if any.
    """
    if isinstance(record, LossRecord):
        log.add_numbers(Moment(record.step, record.time), _numbers_of_step(record))
    elif isinstance(record, EvaluationRecord):
        _log_evaluation(log, record)
    elif isinstance(record, PushedHistograms):
        log.add_histograms(Moment(record.step, record.time), record.histograms)
    elif isinstance(record, PushedImages):
        log.add_picture(Moment(record.step, record.time), "images/training", draw_images(record, classes))
    else:
        _log_profile(log, record, last_step)


def _numbers_of_step(record: LossRecord) -> dict[str, float]:
    speed = {"speed/images_per_s": record.images_per_s, "speed/wait_ms": record.wait_ms}
    return {
        "train/loss": record.loss,
        "train/learning_rate": record.lr,
        **{f"train/{name}": value for name, value in record.metrics.items()},
        **{name: value for name, value in speed.items() if math.isfinite(value)},
    }


def _log_evaluation(log: ExperimentLog, record: EvaluationRecord) -> None:
    at = Moment(record.step, record.time)
    ranks = {"eval/top1": record.top1, "eval/top5": record.top5}
    numbers = {"eval/loss": record.loss, **{name: rank for name, rank in ranks.items() if not math.isnan(rank)}}
    for name, value in record.metrics.items():
        if isinstance(value, int | float):
            numbers[f"eval/{name}"] = value
    log.add_numbers(at, numbers)
    for name, matrix in _matrices(record.metrics):
        log.add_picture(at, f"eval/{name}", draw_matrix(matrix))


def _matrices(metrics: Mapping[str, Any]) -> Iterator[tuple[str, NDArray[np.float64]]]:
    for name, value in metrics.items():
        if isinstance(value, list):
            array = np.array(value, np.float64)
            if array.ndim == 2 and min(array.shape) > 0 and max(array.shape) <= MOST_MAP_SIDE:
                yield name, array


_PROFILE_COLUMNS = ("Mean Duration", "Duration Std Dev", "Number of Calls", "Samples/Second", "Total Time",
                    "Percent of Total")  # fmt: skip


def _log_profile(log: ExperimentLog, profile: Profile, step: int) -> None:
    at = Moment(step, time.time())
    actions = [(row.phase, row.action, *_cells(row)) for row in profile.rows]
    log.add_table(at, "profile/actions", Table(("Phase", "Action", *_PROFILE_COLUMNS), actions))
    if profile.scopes:
        scopes = [(row.phase, row.action, row.scope, *_cells(row)) for row in profile.scopes]
        log.add_table(at, "profile/scopes", Table(("Phase", "Action", "Scope", *_PROFILE_COLUMNS), scopes))
    rates = {f"profile/{row.phase}/{row.action}": row.samples_per_s for row in profile.rows}
    log.add_numbers(at, {name: rate for name, rate in rates.items() if rate is not None})


def _cells(row: ProfileRow | ScopeRow) -> tuple[Cell, ...]:
    return row.mean_s, row.std_s, row.calls, row.samples_per_s, row.total_s, row.percent


def draw_images(pushed: PushedImages, classes: Sequence[str] | None) -> Image.Image:
    """Return the images as a square grid, each with its class below; of a mixed image, both classes and their shares.

    Args:
        pushed: the images.
        classes: readable names of the classes; None shows their numbers.
    """
    side, lines = max(pushed.images.shape[1:3]), captions(pushed, classes)
    thumbnail = side * max(1, round(_LEAST_SIDE / side))
    caption = _LINE * max(map(len, lines), default=0)
    num_columns = math.ceil(math.sqrt(len(pushed.images)))
    return draw_sheet(
        pushed.images,
        ["\n".join(each) for each in lines],
        [divmod(index, num_columns) for index in range(len(lines))],
        num_columns=num_columns,
        geometry=Geometry(thumbnail, gap=_GAP, caption=caption, header=_GAP, line=_LINE),
    )


def captions(pushed: PushedImages, classes: Sequence[str] | None) -> list[tuple[str, ...]]:
    """Return the lines below each image: its class or, of a mixed image, both classes, the larger share first.

    There are none without class numbers. Shares below half a percent are left out.
    """
    if pushed.labels is None:
        return [()] * len(pushed.images)
    labels = pushed.labels.tolist()
    names = [printable(classes[each]) if classes and 0 <= each < len(classes) else str(each) for each in labels]
    if pushed.mix_weights is None:
        return [(name,) for name in names]
    found = []
    for index, (name, share) in enumerate(zip(names, pushed.mix_weights.tolist(), strict=True)):
        partner = index ^ 1
        # The partner of the last of an odd number of images is not among them.
        shares = [(share, name), (1 - share, names[partner] if partner < len(names) else "another image")]
        kept = sorted((each for each in shares if each[0] >= _LEAST_SHARE), key=lambda each: -each[0])
        found.append(tuple(f"{each:.0%} {label}" if len(kept) > 1 else label for each, label in kept))
    return found


def draw_matrix(matrix: NDArray[np.float64]) -> Image.Image:
    """Return a matrix as a heat map, in which each row's largest value is black, and 0 and NaN are white.

    Of a confusion matrix, whose rows are the true classes, the diagonal should be black.
    """
    values = np.nan_to_num(np.maximum(matrix, 0), posinf=0)
    largest = values.max(axis=1, keepdims=True, initial=0)
    shares = values / np.where(largest > 0, largest, 1)
    image = Image.fromarray(np.round(255 * (1 - shares)).astype(np.uint8))
    factor = max(1, _LEAST_MAP_SIDE // max(matrix.shape))
    enlarged = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    return ImageOps.expand(enlarged.convert("RGB"), border=1, fill=_FRAME)


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
        """Take what is known of the run; see `loopfeed.Sink`."""
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
