"""Notices during a run, printed on a separate thread, because printing blocks for ever if nobody reads the output."""

import queue
from collections.abc import Callable
from contextlib import suppress

from loopfeed.preprocess.workers import Worker

# A notice is normally printed in microseconds; one that blocks must not delay the end of the run.
_NOTICE_TIMEOUT_S = 0.5


def outliving_display(notify: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes notices on, and ignores that they cannot be written or encoded."""

    def say(notice: str) -> None:
        with suppress(OSError, UnicodeError):
            notify(notice)

    return say


class Notices:
    """A queue of notices that are passed to `notify` in order; the run continues even if `notify` blocks or raises.

    Args:
        notify: called with each notice, on this object's thread.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        # Only the `put` of this kind of queue is documented to be safe in a signal handler.
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._worker = Worker(self._work, "notices")

    def start(self) -> None:
        """Start the thread, which first prints the notices already queued; called once."""
        self._worker.start(is_attended=False)

    def say(self, notice: str) -> None:
        """Queue a notice and return at once; safe from any thread and from signal handlers."""
        self._waiting.put(notice)

    def close(self) -> None:
        """Wait, for a limited time, until the queued notices are printed, so that they precede later output."""
        self._waiting.put(None)
        self._worker.wait(_NOTICE_TIMEOUT_S)

    def _work(self) -> None:
        while (notice := self._waiting.get()) is not None:
            # After Ctrl-C in `run-train | tee log`, tee is gone before this is printed. A failure to print must not end
            # the run.
            with suppress(Exception):
                self._notify(notice)
