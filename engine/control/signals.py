"""Stopping a run cleanly on signals, and waiting for slow work without delaying the handling of signals.

Python runs signal handlers on the main thread, between bytecodes. Therefore anything slow (compiling, the program
itself) runs on a worker thread while the main thread waits here. For the same reason a handler must not print: if
nothing reads the pipe, the main thread would block there and see no further signal.
"""

import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self

from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.peers import is_supervised, num_supervisor_signals
from loopfeed.preprocess.stop_signals import SignalBursts, install, stop_signals, uninstall
from loopfeed.preprocess.workers import Worker


class StopSignals:
    """A context manager that turns the stop signals into a clean stop; it does nothing outside the main thread.

    These are SIGINT, SIGTERM and, unless it is ignored, SIGHUP (`loopfeed.preprocess.stop_signals`).

    Before the program is launched, and after it has failed, a signal raises KeyboardInterrupt, since nothing would be
    lost. In between, the first signal requests a stop at the next step, and the second raises KeyboardInterrupt, unless
    it comes so soon that one sender has sent it twice. Under a supervisor, which passes on what a scheduler sends to
    all processes, only the signals from it are counted.

    Args:
        board: receives the request, with the signal's name as its reason.
        say: called with a message from inside the signal handler: see `loopfeed.engine.stream.notices`.
        where: the point at which the run then stops, for the message.
    """

    def __init__(self, board: ControlBoard, say: Callable[[str], None], where: str = "at the next step") -> None:
        self._board, self._say, self._where = board, say, where
        self._numbers: tuple[signal.Signals, ...] = ()
        self._is_launched = False
        self._num_seen, self._bursts = 0, SignalBursts()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._numbers = stop_signals()
            for number in self._numbers:
                install(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number in self._numbers:
            uninstall(number)

    def launched(self) -> None:
        """Mark the program as running: from now on the first signal stops it cleanly. Call this once."""
        self._is_launched = True

    def failed(self) -> None:
        """Mark the program as failed: from now on a signal raises KeyboardInterrupt again."""
        self._is_launched = False

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        num_seen = max(1, num_supervisor_signals()) if is_supervised() else self._num_seen + self._bursts.is_new()
        if num_seen == self._num_seen:
            return
        self._num_seen = num_seen
        name = signal.Signals(number).name
        # First: Python discards an exception that is raised in a collector's callback, such as jax's, or in __del__.
        self._board.request_stop(name)
        if not self._is_launched or self._num_seen > 1:
            raise KeyboardInterrupt
        self._say(f"{name}: stopping {self._where}; a second signal quits at once")


def ignore_message(_: str) -> None:
    """Ignore a message; pass this as `say` to `StopSignals` where a signal stops the work at once, not cleanly."""


def call_on_worker[T](function: Callable[..., T], *arguments: Any) -> T:
    """Call `function` on a worker thread and return its result; signals are handled meanwhile.

    Raises:
        BaseException: whatever the function raised, with its traceback, or KeyboardInterrupt if a signal interrupts the
            wait, or what another thread sets for this one; the function is then still at work.
    """
    return start_on_worker(function, *arguments).result()


def start_on_worker[T](function: Callable[..., T], *arguments: Any) -> Worker[T]:
    """Start a call of `function` on a worker thread, and return the worker, whose `result` waits for it.

    On a new thread each time, compiling would fill one of glibc's arenas after the other: 780 instead of 300 MB after
    60 runs of ResNet-8 on two cores.
    """
    return Worker(partial(function, *arguments), "worker").start()
