"""The watchdog of a run: says who waits for whom if no step ends for long, with the stacks of all threads."""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol


class Watched(Protocol):
    """What is watched; any thread may call this while it works."""

    def progress(self) -> object:
        """Return a value that changes with every step, evaluation batch and other progress."""
        ...

    def describe(self) -> str:
        """Return who waits for whom."""
        ...

    def continues(self) -> bool:
        """Return whether the run goes on; after progress at its end, it does not."""
        ...


class Watchdog:
    """Looks whether the run makes progress; `look` is called several times a second, on one thread.

    Args:
        warn_s: seconds without progress after which it warns, again after twice as long, and so on.
        watched: the run.
        say: called with one line; must not block.
        keep: called with a report with the stacks of all threads; must not block.
        clock: returns seconds.
    """

    def __init__(
        self,
        warn_s: float,
        watched: Watched,
        *,
        say: Callable[[str], None],
        keep: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._warn_s, self._watched = warn_s, watched
        self._say, self._keep, self._clock = say, keep, clock
        self._seen, self._since = watched.progress(), clock()
        self._next_s = warn_s

    def look(self) -> None:
        """Warn if there was no progress for so long, or say that the run continues."""
        now, seen = self._clock(), self._watched.progress()
        stalled_s = now - self._since
        if seen != self._seen:
            if self._next_s > self._warn_s and self._watched.continues():
                self._say(f"the run continues after {describe_span(stalled_s)} without a step")
            self._seen, self._since, self._next_s = seen, now, self._warn_s
        elif stalled_s >= self._next_s:
            self._next_s *= 2
            what = f"no step for {describe_span(stalled_s)}: {self._describe_safely()}"
            self._say(f"warning: {what}")
            self._keep(f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}: {what}\n\n{describe_threads()}")

    def _describe_safely(self) -> str:
        try:
            return self._watched.describe()
        except Exception as error:  # noqa: BLE001 - what it looks at is changed by other threads; the stacks remain
            return f"who waits for whom is unknown ({type(error).__name__}: {error})"


def describe_span(seconds: float) -> str:
    """Return a span of time in words, with a decimal if it is short."""
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def describe_threads() -> str:
    """Return the stack of every thread of this process, with the names of the threads."""
    names = {each.ident: each.name for each in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, "not started by Python")
        parts.append(f"Thread {name} ({ident}):\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)
