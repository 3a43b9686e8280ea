"""The threads that watch a launch: one samples the ring and runs the watchdog, one writes the files.

The watchdog says who waits for whom if no step ends for long, with the stacks of all threads. A disk that hangs stops
neither the run nor the watchdog. Errors of monitoring are reported once.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from loopfeed.engine.records.file_errors import LostFileError
from loopfeed.engine.records.run_folder import RUNTIME, STALLS
from loopfeed.engine.runtime.record import LaunchState, RingSample, RuntimeReport
from loopfeed.engine.runtime.runtime_file import encode_runtime
from loopfeed.preprocess.system_errors import error_text
from loopfeed.preprocess.workers import SPARE, Worker, wait_for


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
    """Return the stack of every thread of this process that does not wait for work, with the names of the threads."""
    names = {each.ident: each.name for each in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, "not started by Python")
        if name.startswith(SPARE):
            continue
        parts.append(f"Thread {name} ({ident}):\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)


_LOOK_EVERY_S = 0.1
_WRITE_EVERY_S = 30.0
# How long the end of a run waits for the last write: a disk that hangs must not keep the process.
_LAST_WRITE_S = 10.0
_MOST_SAMPLES = 240
MOST_STALLS_BYTES = 1 << 20
"""The size of `stalls.txt`, which keeps the newest reports."""
_SEPARATOR = "=" * 80 + "\n"

type Write = Callable[[str, bytes], None]
"""(name of a file of the run folder, its content) → None; whole or not at all, raises OSError."""


class RingSamples:
    """Evenly spaced samples of a number, of which there are never more than 240: then every other is dropped."""

    def __init__(self, every_s: float = _LOOK_EVERY_S) -> None:
        self._every_s, self._next_s = every_s, 0.0
        self._samples: list[RingSample] = []

    def offer(self, sample: RingSample) -> None:
        """Keep a sample if it is time for one."""
        if sample.time_s < self._next_s:
            return
        self._samples = [*self._samples, sample]
        self._next_s = sample.time_s + self._every_s
        if len(self._samples) >= _MOST_SAMPLES:
            self._samples = self._samples[::2]
            self._every_s *= 2

    def all(self) -> tuple[RingSample, ...]:
        """Return the samples; safe from any thread."""
        return tuple(self._samples)


class Recorded(Watched, Protocol):
    """A launch that is watched and recorded; any thread may call this while it works."""

    def report(self, state: LaunchState, samples: tuple[RingSample, ...]) -> RuntimeReport:
        """Return what the run did so far, of which this launch is the last."""
        ...

    def sample_ring(self) -> RingSample | None:
        """Return how many batches are ready; None if that says nothing now, as outside of the loop."""
        ...


class RuntimeMonitor:
    """Watches one launch from `start` to `finish`.

    Args:
        launch: the launch.
        warn_s: seconds without progress after which the watchdog warns; 0 has none.
        write: writes a file of the run folder; None if there is no folder.
        stalls: the content of `stalls.txt` so far.
        say: called with one line; must not block.
        on_stall: called with the first line of each report of a stall; must not block.
    """

    def __init__(
        self,
        launch: Recorded,
        *,
        warn_s: float = 0.0,
        write: Write | None = None,
        stalls: bytes = b"",
        say: Callable[[str], None] = lambda _: None,
        on_stall: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._launch, self._write, self._say, self._on_stall = launch, write, say, on_stall
        self._watchdog = Watchdog(warn_s, launch, say=say, keep=self.keep_stall) if warn_s else None
        self._samples = RingSamples()
        self._stalls, self._has_stalls = stalls, False
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._is_due, self._last, self._has_warned = True, b"", False
        self._workers = [Worker(self._watch, "runtime-watch")]
        if write is not None:
            self._workers.append(Worker(self._record, "runtime-record"))

    def start(self) -> None:
        """Start the threads, the first write included."""
        try:
            for worker in self._workers:
                worker.start(is_attended=False)
        except RuntimeError as error:  # the system refuses to start another thread
            self._warn(f"the run is not watched ({error})")

    def write_soon(self) -> None:
        """Write the file now instead of within 30 seconds; safe from any thread."""
        with self._changed:
            self._is_due = True
            self._changed.notify_all()

    def keep_stall(self, text: str) -> None:
        """Append a report to `stalls.txt`; safe from any thread."""
        self._on_stall(text.partition("\n")[0])
        with self._changed:
            reports = self._stalls + (_SEPARATOR + text + "\n").encode(errors="replace")
            if len(reports) > MOST_STALLS_BYTES:
                # Without the rest of a report that has lost its beginning.
                begin = reports.find(_SEPARATOR.encode(), len(reports) - MOST_STALLS_BYTES)
                reports = reports[max(begin, len(reports) - MOST_STALLS_BYTES) :]
            self._stalls = reports
            self._has_stalls = self._is_due = True
            self._changed.notify_all()

    def so_far(self, state: LaunchState = "running") -> RuntimeReport:
        """Return the report as of now."""
        return self._launch.report(state, self._samples.all())

    def finish(self, state: LaunchState, timeout_s: float = _LAST_WRITE_S) -> RuntimeReport:
        """Stop watching, write the files a last time, and return the final report.

        Args:
            state: how the launch ended.
            timeout_s: longest wait for the disk.
        """
        report = self.so_far(state)
        with self._changed:
            self._last = encode_runtime(report)
            self._ended.set()
            self._changed.notify_all()
        if wait_for(self._workers, timeout_s):
            self._watchdog = None  # which refers to this object and, by the launch, to the program
        if self._workers[-1].is_at_work:
            self._warn(f"{RUNTIME} was not written within {timeout_s:g} s: check the disk of the run folder")
        return report

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_EVERY_S):
            with suppress(Exception):
                sample = self._launch.sample_ring()
                if sample is not None:
                    self._samples.offer(sample)
            if self._watchdog is not None:
                # What it looks at is changed by other threads.
                with suppress(Exception):
                    self._watchdog.look()

    def _record(self) -> None:
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(lambda: self._is_due or self._ended.is_set(), _WRITE_EVERY_S)
                is_last, content, self._is_due = self._ended.is_set(), self._last, False
                stalls = self._stalls if self._has_stalls else b""
                self._has_stalls = False
            self._write_files(content, stalls)

    def _write_files(self, content: bytes, stalls: bytes) -> None:
        assert self._write is not None
        try:
            if stalls:
                self._write(STALLS, stalls)
            self._write(RUNTIME, content or encode_runtime(self.so_far()))
        except LostFileError:
            pass  # the run itself reports it
        except Exception as error:  # noqa: BLE001 - a monitor never stops a run
            self._warn(f"{RUNTIME} could not be written ({error_text(error)}); the run continues without it")

    def _warn(self, warning: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._say(f"warning: {warning}")
