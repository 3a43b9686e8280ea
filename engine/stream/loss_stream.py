"""The host's end of the outfeed: queues between the program, which must not wait, and sinks, which may be slow.

Everything that the program emits becomes a record, once and in order, on the runtime's thread. Each sink has its own
queue and thread, so that a blocked terminal does not delay the file.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.crossing.pushed import (
    Pushed,
    PushedEvaluation,
    PushedHistograms,
    PushedImages,
    PushedLosses,
    PushedSnapshot,
    mean_of_images,
)
from loopfeed.engine.profile.table import Profile
from loopfeed.engine.spans import CLOSE, SINK, STEP_WAIT, Spans, StageTimes
from loopfeed.engine.stages import StageRanges
from loopfeed.engine.stream.lane import Lane, Record
from loopfeed.engine.stream.sinks import (
    EvaluationProgress,
    EvaluationRecord,
    LossRecord,
    Sink,
    is_display,
)
from loopfeed.engine.stream.spooled_losses import SpooledLosses
from loopfeed.preprocess.system_errors import error_text
from loopfeed.preprocess.workers import Worker

# Progress of an evaluation is sent only to a sink that is at most this far behind.
_FEW_QUEUED = 16
_PUSH_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 60.0
# After a stop request, the longest wait for sinks that accept nothing at all.
_STOP_PATIENCE_S = 3.0
# A shorter wait for the sinks at the end counts as none.
_LEAST_END_S = 0.1
# How soon a wait notices a stop or room in a queue. The queue is so long that a slow sink never runs out of records.
_LOOK_EVERY_S = 0.05
MOST_LISTED_NUMBERS = 1 << 20
"""How many numbers the lists of evaluations that are kept in memory may have, which then take 40 MB."""


class LossStream:
    """A stream that passes records from the program to the sinks, each of which has its own thread.

    A sink that raises, or accepts nothing for too long, gets no more records; its exception is kept, and the run is
    asked to stop, unless the sink is a display (`loopfeed.Sink`): then a warning says so. The
    other sinks still get every record. Sinks are written to and closed on their threads, so that a sink that hangs
    blocks nothing for ever.

    Args:
        batch: images per step.
        ranges: the steps of each stage; None is one stage.
        step: updates done before the launch.
        wait_of: returns the seconds that the program waited for the batch of a step (from 0).
        board: asked to stop the run if a sink fails.
        spans: of the launch; None makes new ones.
        warn: called with the warning about a display that failed, from any thread: it must not block.
        on_nonfinite: called once with the first step (updates done, from 1) whose loss is NaN or infinite, on the
            program's thread: it must not block (`loopfeed.engine.stream.notices`).

    Attributes:
        first_nonfinite_step: the first step (updates done, from 1) whose loss is NaN or infinite, or None.
        stages: the steps and times of each stage that this launch has made steps of, by number from 0.
        evaluations: every evaluation so far, in order; the oldest without the lists among their metrics, if the lists
            of all have more than `MOST_LISTED_NUMBERS` numbers.
        num_evaluation_pulls: how often the program asked for batches of an evaluation.
        blocked_by: the name of the sink for which the program waits now, as its queue is full, None if for none.
        failure: the first exception of a sink, or None.
    """

    def __init__(
        self,
        *,
        batch: int,
        ranges: StageRanges | None = None,
        step: int = 0,
        wait_of: Callable[[int], float],
        board: ControlBoard,
        spans: Spans | None = None,
        warn: Callable[[str], None] = lambda _: None,
        on_nonfinite: Callable[[int], None] | None = None,
    ) -> None:
        self._lanes: list[Lane] = []
        self._wait_of, self._board = wait_of, board
        self._ranges = ranges or StageRanges.of([0], [batch])
        self.stages: dict[int, StageTimes] = {}
        self._last_step = step
        self.num_evaluation_pulls = 0
        self._on_nonfinite, self._warn = on_nonfinite, warn
        self._is_closed = False
        self._last_time = time.time()
        self._failing = threading.Lock()
        self._losses = SpooledLosses()
        self.first_nonfinite_step: int | None = None
        self.evaluations: list[EvaluationRecord] = []
        self._num_listed, self._first_listed = 0, 0
        self._spans = Spans() if spans is None else spans
        self._waits = self._spans[STEP_WAIT]
        self.blocked_by: str | None = None
        self.failure: BaseException | None = None

    @property
    def wait_s(self) -> float:
        """Seconds that the steps so far waited for their batches."""
        return self._waits.total_s

    @property
    def num_losses(self) -> int:
        """The number of losses received so far."""
        return len(self._losses)

    @property
    def losses(self) -> NDArray[np.float32]:
        """All losses received so far, in order, as float32 [n]."""
        return self._losses.to_array()

    def release(self) -> None:
        """Discard the losses and close their temporary file; arrays returned by `losses` stay valid."""
        self._losses.close()

    def start(self, sinks: Sequence[Sink]) -> None:
        """Open the sinks, which then get all records in order, and start the clock; called once, before the launch.

        Raises:
            BaseException: whatever a sink raised in `open`; the sinks opened before it are then closed.
        """
        opened: list[Sink] = []
        try:
            for sink in sinks:
                if self._open(sink):
                    opened.append(sink)
            self._last_time = time.time()
            for sink in opened:
                lane = Lane(sink, self._keep)
                lane.worker.start(is_attended=False)
                self._lanes.append(lane)
        except BaseException:
            for sink in opened[len(self._lanes) :]:
                # The error of `open` is the one to raise.
                with suppress(BaseException):
                    sink.close()
            self.close()
            raise

    def _open(self, sink: Sink) -> bool:
        """Open a sink; return False, with a warning, if it is a display that cannot be opened."""
        try:
            sink.open()
        except Exception as error:
            if not is_display(sink):
                raise
            self._warn_of(error, type(sink).__name__)
            return False
        return True

    def receive(self, pushed: Pushed) -> None:
        """Queue the program's output for the sinks, or drop it after `close`; called on one thread at a time.

        Returns at once if every sink keeps up. Otherwise it waits, for a limited time, unless a stop was requested: the
        last records before a stop may exceed the bound of the queue.
        """
        if self._is_closed:
            return
        for record in self._records(pushed):
            for lane in self._lanes:
                self._wait_while(lane, partial(lane.is_full, record))
            lanes = [lane for lane in self._lanes if not lane.is_left_out and lane.accepts(record)]
            for lane in lanes:
                lane.put(record)
            for lane in lanes:
                self._wait_while(lane, lane.is_behind)

    def report_evaluation(self, batch: int, num_batches: int) -> None:
        """Send an evaluation's progress to the sinks that show it without lagging; `batch` is the next batch index."""
        self.num_evaluation_pulls += 1
        for lane in self._lanes:
            if lane.takes(EvaluationProgress) and not lane.is_left_out and lane.records.qsize() < _FEW_QUEUED:
                lane.records.put(EvaluationProgress(self._last_step, batch, num_batches))

    def report_profile(self, profile: Profile) -> None:
        """Queue the profile of the launch for the sinks that take one; called after the loop, before `close`."""
        for lane in self._lanes:
            if lane.takes(Profile) and not lane.is_left_out:
                lane.records.put(profile)

    def end_sinks_without_profile(self) -> None:
        """Let the sinks that take no profile write what is queued and close; called after the loop, before `close`."""
        for lane in self._lanes:
            if not lane.takes(Profile):
                lane.records.put(None)

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Pass the queued records to the sinks and close the sinks, within a time limit; may be called again.

        Keeps the exception of a sink that fails here, or a TimeoutError if a sink hangs. The thread of a sink that
        hangs, a daemon, is abandoned, but still writes and closes if the sink ever continues. If a stop was requested
        and no sink accepts anything, all are abandoned after three seconds.

        Args:
            timeout_s: time limit for all sinks together.
        """
        self._is_closed = True
        for lane in self._lanes:
            lane.records.put(None)
        started = time.monotonic()
        hung = self._wait_for_ends(started + timeout_s)
        self._count_end(time.monotonic() - started)
        waited_s = time.monotonic() - started
        for lane in hung:
            if lane.is_display:
                self._warn_of(TimeoutError(f"it did not accept the last losses within {waited_s:.3g} s"), lane.name)
        if hung := [lane for lane in hung if not lane.is_display]:
            names = " and ".join(lane.name for lane in hung)
            self._fail(
                TimeoutError(
                    f"sinks must accept the last losses in time, but {names} did not within {waited_s:.3g} s: "
                    "check the terminal or the disk that they write to"
                )
            )

    @property
    def num_taken(self) -> int:
        """The number of records that the sinks have accepted, summed over the sinks."""
        return sum(lane.num_taken for lane in self._lanes)

    def _count_end(self, waited_s: float) -> None:
        """Count the wait of `close` for the sink that took longest, unless it is what closing always takes."""
        name, self.blocked_by = self.blocked_by, None
        if name is not None and waited_s >= _LEAST_END_S:
            self._spans[SINK + name].add(waited_s)
            self._spans[CLOSE].add(waited_s)

    @property
    def workers(self) -> list[Worker[None]]:
        """The threads of the sinks."""
        return [lane.worker for lane in self._lanes]

    def unfinished(self) -> list[str]:
        """Return the names of the sinks whose threads have not ended."""
        return [lane.name for lane in self._lanes if lane.worker.is_at_work]

    def _wait_for_ends(self, deadline: float) -> list[Lane]:
        """Wait for the sinks' threads to end; return the lanes (one per sink) whose threads did not end in time."""
        taken, patient_until = -1, math.inf
        while working := [lane for lane in self._lanes if lane.worker.is_at_work and not lane.is_given_up]:
            now = time.monotonic()
            self.blocked_by = working[-1].name
            taken_before, taken = taken, sum(lane.num_taken for lane in working)
            if taken != taken_before or not self._board.is_stop_requested():
                patient_until = now + _STOP_PATIENCE_S
            ends = min(deadline, patient_until)
            if now >= ends:
                return working
            working[0].worker.wait(min(_LOOK_EVERY_S, ends - now))
        return []

    def _wait_while(self, lane: Lane, is_behind: Callable[[], bool]) -> None:
        if not is_behind():
            return
        wait, self.blocked_by = self._spans[SINK + lane.name], lane.name
        wait.begin()
        self._wait_for_room(lane, is_behind)
        wait.end()
        self.blocked_by = None

    def _wait_for_room(self, lane: Lane, is_behind: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PUSH_TIMEOUT_S
        while is_behind() and not self._board.is_stop_requested():
            if time.monotonic() >= deadline:
                lane.give_up()
                self._keep(
                    TimeoutError(
                        f"a sink must accept a loss within {_PUSH_TIMEOUT_S:g} s, but {lane.name} did not, and "
                        f"{lane.records.qsize()} records are queued: check the terminal or the disk that it writes to"
                    ),
                    lane,
                )
                return
            time.sleep(_LOOK_EVERY_S)

    def _records(self, pushed: Pushed) -> Sequence[Record]:
        if isinstance(pushed, PushedSnapshot | PushedHistograms | PushedImages):
            return [pushed]
        if isinstance(pushed, PushedEvaluation):
            evaluation = EvaluationRecord(
                step=pushed.step,
                num_images=pushed.num_images,
                top1=mean_of_images(pushed.top1, pushed.num_images),
                top5=mean_of_images(pushed.top5, pushed.num_images),
                loss=pushed.loss,
                time=pushed.time,
                metrics=pushed.metrics or {},
            )
            self._keep_evaluation(evaluation)
            # The next step's images/s must not include the time of the evaluation.
            self._last_time = pushed.time
            return [evaluation]
        return self._loss_records(pushed)

    def _keep_evaluation(self, evaluation: EvaluationRecord) -> None:
        """Keep an evaluation, and leave out the lists of the oldest ones if all lists have too many numbers."""
        self.evaluations.append(evaluation)
        self._num_listed += evaluation.num_listed
        while self._num_listed > MOST_LISTED_NUMBERS and self._first_listed < len(self.evaluations) - 1:
            oldest = self.evaluations[self._first_listed]
            self._num_listed -= oldest.num_listed
            self.evaluations[self._first_listed] = oldest.without_lists()
            self._first_listed += 1

    def _loss_records(self, pushed: PushedLosses) -> list[LossRecord]:
        first = pushed.first_step - 1
        num_images = self._ranges.image_at(first + len(pushed.losses)) - self._ranges.image_at(first)
        started, elapsed_s = self._last_time, pushed.time - self._last_time
        if num_images:
            self._last_time = pushed.time
            stage = self._ranges.stage_of(first)
            before = self.stages.get(stage) or StageTimes(first, first, first_step_s=elapsed_s)
            self.stages[stage] = before.add(len(pushed.losses), num_images, elapsed_s)
        images_per_s = num_images / elapsed_s if elapsed_s > 0 else math.nan
        records = []
        for number, (loss, learning_rate) in enumerate(zip(pushed.losses, pushed.learning_rates, strict=True), start=1):
            step = pushed.first_step + number - 1
            # Losses that arrive together share the time since the previous ones evenly.
            is_last = number == len(pushed.losses) or elapsed_s <= 0
            loss_time = pushed.time if is_last else started + elapsed_s * number / len(pushed.losses)
            self._last_step = step
            wait_s = self._wait_of(step - 1)
            self._waits.add(wait_s)
            self._losses.append(loss)
            if self.first_nonfinite_step is None and not math.isfinite(loss):
                self.first_nonfinite_step = step
                if self._on_nonfinite is not None:
                    self._on_nonfinite(step)
            records.append(
                LossRecord(
                    step=step,
                    loss=loss,
                    lr=learning_rate,
                    images_per_s=images_per_s,
                    wait_ms=wait_s * 1e3,
                    time=loss_time,
                    metrics={name: values[number - 1] for name, values in (pushed.metrics or {}).items()},
                )
            )
        return records

    def _keep(self, error: BaseException, lane: Lane) -> None:
        if lane.is_display:
            self._warn_of(error, lane.name)
        else:
            self._fail(error)

    def _warn_of(self, error: BaseException, name: str) -> None:
        self._warn(f"warning: {name} shows nothing more ({error_text(error)}); the run is not affected")

    def _fail(self, error: BaseException) -> None:
        with self._failing:
            if self.failure is None:
                self.failure = error
        self._board.request_stop("a sink of the loss stream failed")
