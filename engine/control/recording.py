"""Records control events on a thread of its own, so that a disk that hangs delays neither the program nor a stop.

Owns who decides whether an event takes effect: the program, which waits a while for the record, or the thread, which
has written it. Does not know files.
"""

import queue
import threading
import time
from collections.abc import Callable

from loopfeed.engine.control.request import ControlEvent
from loopfeed.preprocess.workers import Worker

type Confirm = Callable[[], bool]
"""Called once the event is recorded: () → whether it takes effect; if not, the record must be taken back."""

# How soon a wait notices that it is cancelled; a healthy disk has the event within a millisecond.
_LOOK_EVERY_S = 0.05
_CLOSE_TIMEOUT_S = 1.0


class Recording:
    """The recording of one event: it is confirmed on one thread, or given up on another, but never both.

    Args:
        event: the event.
        on_late: called if the event is given up, on the thread that waits.
    """

    def __init__(self, event: ControlEvent, on_late: Callable[[ControlEvent], None]) -> None:
        self.event, self._on_late = event, on_late
        self._guard = threading.Lock()
        self._is_confirmed = self._is_given_up = False
        self._error: BaseException | None = None
        self._decided, self._over = threading.Event(), threading.Event()

    def confirm(self) -> bool:
        """Note that the event is recorded; return whether it takes effect."""
        with self._guard:
            self._is_confirmed = not self._is_given_up
        self._decided.set()
        return self._is_confirmed

    @property
    def is_given_up(self) -> bool:
        """Whether the event takes no effect, because it was not recorded in time."""
        return self._is_given_up

    def end(self, error: BaseException | None = None) -> None:
        """Note that nothing more is done about the event; `error` is why it could not be recorded or taken back."""
        self._error = error
        self._decided.set()
        self._over.set()

    def wait(self, timeout_s: float, is_cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Return whether the event is recorded; give it up after `timeout_s` seconds, or soon if the wait is cancelled.

        Raises:
            BaseException: why it could not be recorded.
        """
        deadline = time.monotonic() + timeout_s
        while not self._decided.wait(max(0.0, min(_LOOK_EVERY_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or is_cancelled():
                break
        with self._guard:
            self._is_given_up = not self._is_confirmed
        if self._is_confirmed:
            return True
        self.raise_error()
        self._on_late(self.event)
        return False

    def is_over(self, timeout_s: float = 0.0) -> bool:
        """Return whether nothing more is done about the event, after waiting for that.

        Raises:
            BaseException: why it could not be recorded or taken back.
        """
        is_over = self._over.wait(timeout_s)
        self.raise_error()
        return is_over

    def raise_error(self) -> None:
        """Raise the error with which the recording ended, if any."""
        if self._error is not None:
            raise self._error


class EventRecorder:
    """A thread that records events one after the other.

    Args:
        record: called on the thread with each event that is not given up, and with what confirms it.
        on_late: called with each event that is given up.
    """

    def __init__(
        self,
        record: Callable[[ControlEvent, Confirm], object],
        on_late: Callable[[ControlEvent], None] = lambda _: None,
    ) -> None:
        self._record, self._on_late = record, on_late
        self._waiting: queue.SimpleQueue[Recording | None] = queue.SimpleQueue()
        self._worker = Worker(self._work, "control-recorder")

    def start(self) -> None:
        """Start the thread; call this once."""
        self._worker.start(is_attended=False)

    def begin(self, event: ControlEvent) -> Recording:
        """Have the thread record an event; return at once."""
        recording = Recording(event, self._on_late)
        self._waiting.put(recording)
        return recording

    def close(self) -> None:
        """End the thread, and wait for it at most a second, because the disk may hang."""
        self._waiting.put(None)
        self._worker.wait(_CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        while (recording := self._waiting.get()) is not None:
            error = None
            try:
                if not recording.is_given_up:
                    self._record(recording.event, recording.confirm)
            except BaseException as raised:  # noqa: BLE001 - raised by the pull that waits, or by the next one
                error = raised
            recording.end(error)
