"""The host's end of the outfeed: a queue between the program, which must not wait, and the sinks, which may be slow."""

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from engine.control import ControlBoard
from engine.outfeed import Pushed, PushedEvaluation, PushedLoss
from engine.sinks import EvaluationRecord, LossRecord, Sink

# A sink that falls this far behind (a terminal held by Ctrl-S, a dead network disk) first slows the run, then ends it.
_MOST_QUEUED = 65_536
_PUSH_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 60.0


class LossStream:
    """Carries losses to the sinks on a thread of its own.

    A sink that raises is left out from then on, its exception kept, and the run asked to stop; the others get
    every record. Sinks are written to and closed on that thread, so that one that hangs holds up nobody for good.

    Args:
        batch: images a step.
        wait_of: gives the seconds that the program waited for the batch of a step (from 0).
        board: asked to stop the run where a sink fails.

    Attributes:
        losses: every loss so far, in order.
        evaluations: every evaluation so far, in order.
        wait_s: seconds waited for batches so far.
        failure: the first exception of a sink, None while there is none.
    """

    def __init__(self, *, batch: int, wait_of: Callable[[int], float], board: ControlBoard) -> None:
        self._opened: list[Sink] = []
        self._batch, self._wait_of, self._board = batch, wait_of, board
        self._queue: queue.Queue[Pushed | None] = queue.Queue(_MOST_QUEUED)
        self._last_time = time.time()
        self.losses: list[float] = []
        self.evaluations: list[EvaluationRecord] = []
        self.wait_s = 0.0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="loss-stream", daemon=True)

    def start(self, sinks: Sequence[Sink]) -> None:
        """Opens the sinks, which get each record in order, and starts the clock; called once, before the program.

        Raises:
            BaseException: what a sink raised in `open`; those opened before it are then closed.
        """
        try:
            for sink in sinks:
                sink.open()
                self._opened.append(sink)
            self._last_time = time.time()
            self._thread.start()
        except BaseException:
            self._close_sinks()
            raise

    def receive(self, pushed: Pushed) -> None:
        """Takes what the program emits; raises TimeoutError where the sinks have stood still for too long."""
        try:
            self._queue.put(pushed, timeout=_PUSH_TIMEOUT_S)
        except queue.Full:
            raise TimeoutError(
                f"the loss stream must be read within {_PUSH_TIMEOUT_S:g} s, and {_MOST_QUEUED} losses wait: "
                "free the terminal or the disk that they go to"
            ) from None

    def close(self) -> None:
        """Hands what is queued to the sinks and closes them, for a limited time; may be called again.

        Keeps the exception of a sink that fails at that, or TimeoutError where one hangs: its thread is then left to
        itself (a daemon), and still hands over and closes if the sink ever goes on.
        """
        if not self._thread.is_alive():
            return
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        with suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._keep(TimeoutError(f"the sinks must take the last losses within {_CLOSE_TIMEOUT_S:g} s, and did not"))

    def _work(self) -> None:
        working = list(self._opened)
        while (pushed := self._queue.get()) is not None:
            record = self._record(pushed)
            working = [sink for sink in working if self._takes(sink, record)]
        self._close_sinks()

    def _takes(self, sink: Sink, record: LossRecord | EvaluationRecord) -> bool:
        """Hands a record to a sink; gives whether the sink goes on."""
        try:
            if isinstance(record, EvaluationRecord):
                sink.write_evaluation(record)
            else:
                sink.write(record)
        except BaseException as error:  # noqa: BLE001 - kept for the caller; the other sinks go on, whatever it was
            self._keep(error)
            return False
        return True

    def _close_sinks(self) -> None:
        for sink in self._opened:
            try:
                sink.close()
            except BaseException as error:  # noqa: BLE001 - one sink's failure must not keep the others open
                self._keep(error)
        self._opened = []

    def _record(self, pushed: Pushed) -> LossRecord | EvaluationRecord:
        if isinstance(pushed, PushedEvaluation):
            count = max(pushed.num_images, 1)
            evaluation = EvaluationRecord(
                step=pushed.step,
                num_images=pushed.num_images,
                top1=pushed.top1 / count,
                top5=pushed.top5 / count,
                loss=pushed.loss,
                time=pushed.time,
            )
            self.evaluations.append(evaluation)
            # The next step's rate is its own: the evaluation's seconds are not.
            self._last_time = pushed.time
            return evaluation
        return self._loss_record(pushed)

    def _loss_record(self, pushed: PushedLoss) -> LossRecord:
        elapsed_s = pushed.time - self._last_time
        self._last_time = pushed.time
        wait_s = self._wait_of(pushed.step - 1)
        self.losses.append(pushed.loss)
        self.wait_s += wait_s
        return LossRecord(
            step=pushed.step,
            loss=pushed.loss,
            lr=pushed.learning_rate,
            images_per_s=self._batch / elapsed_s if elapsed_s > 0 else math.nan,
            wait_ms=wait_s * 1e3,
            time=pushed.time,
        )

    def _keep(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self._board.request_stop("a sink of the loss stream failed")
