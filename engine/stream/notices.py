"""What is said in mid-run: handed to a thread of its own, because a terminal that nobody reads blocks for ever."""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

# A notice that can be given is given in microseconds; one that nobody reads must not hold up the end of the run.
_NOTICE_TIMEOUT_S = 0.5


class Notices:
    """Passes words on to `notify`, in order; where that blocks or raises, the run goes on untold.

    Args:
        notify: told the words, on the thread of this.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        # Of all ways to hand something on, this queue's `put` alone is promised to be safe in a signal handler.
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="notices", daemon=True)

    def start(self) -> None:
        """Begins; called once. What was said before waits until then."""
        self._thread.start()

    def say(self, words: str) -> None:
        """Leaves words to be told; returns at once, from any thread and from signal handlers."""
        self._waiting.put(words)

    def close(self) -> None:
        """Tells what waits, for a limited time, so that it comes before whatever the caller says next."""
        self._waiting.put(None)
        if self._thread.is_alive():
            self._thread.join(_NOTICE_TIMEOUT_S)

    def _work(self) -> None:
        while (words := self._waiting.get()) is not None:
            # `run-train | tee log` and Ctrl-C: tee is gone before this is printed. Whatever it is that fails, what is
            # told counts less than the run.
            with suppress(Exception):
                self._notify(words)
