"""Stopping by signal, and waiting so that signals are seen.

Python runs signal handlers on the main thread, between bytecodes: so whatever takes long (compiling, the program
itself) runs on a worker thread while the main thread waits here. For the same reason a handler must not print: where
nobody reads the pipe, the main thread would stand still in it and see no further signal.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from engine.control.board import ControlBoard

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# How soon a signal is acted on while the main thread waits.
_LOOK_EVERY_S = 0.1


class StopSignals:
    """Turns SIGINT and SIGTERM into a clean stop while it is entered; does nothing off the main thread.

    Before the program is launched, and once it has failed, a signal raises KeyboardInterrupt, since nothing would be
    lost. In between the first asks the board for a stop at the next step, and the second raises KeyboardInterrupt.

    Args:
        board: gets the request, its reason the signal's name.
        say: told of it in words, in a signal handler: see `engine.stream.notices`.
        where: the run then stops, in words.
    """

    def __init__(self, board: ControlBoard, say: Callable[[str], None], where: str = "at the next step") -> None:
        self._board, self._say, self._where = board, say, where
        self._before: dict[signal.Signals, Any] = {}
        self._is_launched = False
        self._num_seen = 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not set from Python, and that Python cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def launched(self) -> None:
        """Marks that from now on there is something to end cleanly; called once."""
        self._is_launched = True

    def failed(self) -> None:
        """Marks that nothing is there any more to end cleanly: a signal raises KeyboardInterrupt again."""
        self._is_launched = False

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._num_seen += 1
        if not self._is_launched or self._num_seen > 1:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        self._board.request_stop(name)
        self._say(f"{name}: stopping {self._where}; once more quits at once")


def call_on_worker[T](function: Callable[..., T], *arguments: Any) -> T:
    """Calls `function` on a thread of its own and waits for it; see `start_on_worker`."""
    return start_on_worker(function, *arguments)()


def start_on_worker[T](function: Callable[..., T], *arguments: Any) -> Callable[[], T]:
    """Calls `function` on a thread of its own; gives what waits for it, leaving the waiting thread open to signals.

    That raises:
        BaseException: whatever the function raised, with its traceback; KeyboardInterrupt where a signal ends the
            wait, the thread then being left to itself (a daemon).
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            failure.append(error)

    thread = threading.Thread(target=work, name="worker", daemon=True)
    thread.start()

    def wait() -> T:
        while thread.is_alive():
            thread.join(_LOOK_EVERY_S)
        if failure:
            raise failure[0]
        return result[0]

    return wait
