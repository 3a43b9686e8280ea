"""A run that trains on a thread of its own, while the caller goes on: what a notebook asks of it.

Owns the handle, the refusal of a second run, and the end of the process. `loopfeed.engine.run.train` has the run.
"""

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.charts.card import html_card, text_card
from loopfeed.engine.control.board import END_OF_PROCESS, ControlBoard
from loopfeed.engine.python_calls import for_python
from loopfeed.engine.records.evaluation_log import describe_evaluations
from loopfeed.engine.run.notebook import notebook_shell
from loopfeed.engine.run.result import TrainResult, described_losses
from loopfeed.engine.run.run import Run
from loopfeed.engine.stream.loss_stream import LossStream
from loopfeed.engine.stream.sinks import EvaluationRecord
from loopfeed.preprocess.system_errors import error_text
from loopfeed.preprocess.workers import Worker

_THREAD = "background-run"
# A notebook's server kills a kernel that has not ended some five seconds after it was asked to.
_END_TIMEOUT_S = 4.0


class BackgroundRun:
    """A run that trains on a thread of its own, as `train(…, background=True)` returns it; a notebook shows its state.

    A kernel that is shut down or restarted first stops the run as `stop` does, for at most four seconds. So does a
    program that ends, but Python then writes no snapshot any more: wait for `result`.

    Example:
        >>> run = train(TrainConfig(data="data", steps=20, batch=4), model=model, background=True)
        >>> run.result().steps_done, run.losses.shape, run.status
        (20, (20,), 'done')
    """

    def __init__(self, board: ControlBoard, train: Callable[[Callable[[Run | None], None]], TrainResult]) -> None:
        self._board = board
        self._stream: LossStream | None = None
        self._keep_best: str | None = None
        self._kept: tuple[NDArray[np.float32], tuple[EvaluationRecord, ...]] = (np.zeros(0, np.float32), ())
        self._worker = Worker(partial(train, self._note), _THREAD)
        _started().add(self)
        self._worker.start()

    @property
    def losses(self) -> NDArray[np.float32]:
        """The losses of this launch so far, float32 [n]."""
        stream = self._stream
        return self._kept[0] if stream is None else stream.losses

    @property
    def evaluations(self) -> tuple[EvaluationRecord, ...]:
        """The evaluations of this launch so far."""
        stream = self._stream
        return self._kept[1] if stream is None else tuple(stream.evaluations)

    @property
    def done(self) -> bool:
        """Whether the run has ended, in whatever way."""
        return not self._worker.is_at_work

    @property
    def status(self) -> Literal["starting", "training", "stopping", "done", "stopped", "failed"]:
        """What the run does, or how it ended."""
        if self.done:
            if self._worker.failure is not None:
                return "failed"
            return "done" if self._worker.result().is_complete else "stopped"
        if self._board.is_stop_requested():
            return "stopping"
        return "training" if len(self.losses) else "starting"

    def stop(self) -> None:
        """Ask the run to stop at its next step, with its weights and a last snapshot; returns at once."""
        self._board.request_stop("run.stop()")

    def result(self, timeout: float | None = None) -> TrainResult:
        """Wait until the run has ended, and return its result.

        To interrupt the wait does not stop the run.

        Args:
            timeout: the longest wait in seconds; None waits as long as it takes.

        Raises:
            BaseException: what the run raised.
            TimeoutError: the run has not ended in time, and goes on.
            KeyboardInterrupt: the wait was interrupted, and the run goes on.
        """
        try:
            has_ended = self._worker.wait() if timeout is None else self._worker.wait(timeout)
        except KeyboardInterrupt as interrupt:
            interrupt.args = ("only the wait was interrupted; the run goes on: run.stop() stops it",)
            for_python(interrupt)
            raise
        if not has_ended:
            raise TimeoutError(f"the run has not ended within {timeout:g} s and goes on: run.stop() stops it")
        try:
            return self._worker.result()
        except BaseException as error:
            for_python(error)
            raise

    def __repr__(self) -> str:
        return text_card(*self._card)

    def _repr_html_(self) -> str:
        """Return its state as a notebook shows it."""
        return html_card(*self._card)

    @property
    def _card(self) -> tuple[str, list[tuple[str, str]]]:
        status, losses, evaluations = self.status, self.losses, self.evaluations
        facts = [("step", f"{len(losses):,} of this launch")]
        if len(losses):
            facts.append(("loss", described_losses(losses)))
        if evaluations:
            facts.append(("evaluation", describe_evaluations(evaluations, self._keep_best)))
        if isinstance(self._worker.failure, Exception):
            facts.append(("error", f"{type(self._worker.failure).__name__}: {error_text(self._worker.failure)}"))
        return f"background run: {status}", facts

    def _note(self, run: Run | None) -> None:
        """Take the run once it is set up, and None when it has ended; its arrays are then kept."""
        if run is None and self._stream is not None:
            self._kept = self._stream.losses, tuple(self._stream.evaluations)
        self._stream = None if run is None else run.stream
        if run is not None:
            self._keep_best = run.config.keep_best

    def _end(self, reason: str) -> bool:
        """Stop the run; return whether it has ended in time."""
        self._board.request_stop(reason)
        return self._worker.wait(_END_TIMEOUT_S)


@cache
def _started() -> weakref.WeakSet[BackgroundRun]:
    """Return the set of the background runs of this process, of which those that train are stopped before it ends."""
    # Not by `atexit`, whose functions are called when the threads of the run may be waiting for ended ones: before
    # that of concurrent.futures, which was registered when it was imported.
    import concurrent.futures.thread  # noqa: F401 - see above

    getattr(threading, "_register_atexit", atexit.register)(_stop_before_the_end)
    if (shell := notebook_shell()) is not None:
        # A kernel is told sooner, while a snapshot can still be written.
        shell.observe(lambda _: _stop("the end of the kernel"), "exit_now")
    return weakref.WeakSet()


def _stop(reason: str) -> bool:
    return all(run._end(reason) for run in [*_started()] if not run.done)


def _stop_before_the_end() -> None:
    # The interpreter would not survive its end beside a program that calls the host.
    if _stop(END_OF_PROCESS):
        return
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write("loopfeed: a background run could not be stopped in time; its last snapshot is kept\n")
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(1)


def check_is_alone() -> None:
    """Raise RuntimeError if a run trains in the background of this process, because two would share its devices."""
    if any(each.name == _THREAD and each is not threading.current_thread() for each in threading.enumerate()):
        raise RuntimeError(
            "only one run may train in a process at a time, but one trains in the background: wait for it with "
            "run.result(), or stop it with run.stop() and wait then"
        )
