"""Capture of traces with jax's profiler, on a thread of the host, while the program runs.

Traces a window of the training batches, and the beginning of the first evaluation unless the window has one. Nothing
here ever stops or changes a run: a trace that fails is reported and left out.
"""

import math
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from loopfeed.engine.scopes import TRAIN, VALID
from loopfeed.preprocess.control_groups import process_memory_bytes
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.workers import Worker

# Longest sleep of the thread; it is woken when it has something to do.
_LOOK_EVERY_S = 1.0
# A window that the user did not choose ends after so long, because the trace of a step can have megabytes.
_MOST_TRACED_S = 10.0
# Bounds of every window: its trace is held in memory, and reading it afterwards takes longer than tracing it.
_MOST_CHOSEN_S = 60.0
_MOST_BATCHES = 1000
_MOST_TRACE_BYTES = 1 << 30
_LEAST_BATCHES = 3
# Longest wait for the trace to be collected at the end of the run.
_CLOSE_TIMEOUT_S = 60.0


class Window(NamedTuple):
    """The batches of a phase to trace, counted from the first of the launch.

    Attributes:
        after: the number of training batches that begin before it.
        num_batches: the number of batches to trace.
        is_chosen: whether the user chose it; otherwise its limit of time is shorter.
        chunk: the number of batches that the program draws at once.
    """

    after: int
    num_batches: int
    is_chosen: bool = False
    chunk: int = 1

    def end(self, num_batches: int) -> int:
        """Return how many batches have begun after the first one when so many have been traced whole.

        The batches after the last one are traced only if they have been drawn, so the next ones must begin too.
        """
        return (-(-num_batches // self.chunk) + 1) * self.chunk + 1


class Trace(NamedTuple):
    """A trace.

    Attributes:
        first: the number of its first batch of each phase, counted from the first of the launch.
        data: a `jax.profiler.ProfileData`.
        limit: the limit that ended it before its window did, such as "60 s"; None if none did.
    """

    first: Mapping[str, int]
    data: Any
    limit: str | None = None


class Capture:
    """A thread that traces a window of each phase, between `start` before the loop and `stop` after it.

    Args:
        windows: the window of each phase.
        warn: called with a line of text if a trace fails.

    Attributes:
        traces: the traces, by the phase whose window it was; complete after `stop`.
    """

    def __init__(self, windows: Mapping[str, Window], warn: Callable[[str], None]) -> None:
        self._windows, self._warn = dict(windows), warn
        self.traces: dict[str, Trace] = {}
        self._begun = {TRAIN: 0, VALID: 0}
        # The first batch of each phase that was drawn since the last trace began.
        self._first_drawn: dict[str, int] = {}
        # What the thread waits for.
        self._is_awaited: Callable[[], bool] = self._is_due
        self._changed = threading.Event()
        self._is_over = self._is_late = False
        self._worker = Worker(self._work, "profile-capture")

    def start(self) -> None:
        """Start the thread; called once."""
        self._worker.start(is_attended=False)

    def abandon(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._is_over = True
        self._changed.set()

    def stop(self) -> None:
        """End a trace in progress and wait, for a limited time, until it is collected."""
        self.abandon()
        if not self._worker.wait(_CLOSE_TIMEOUT_S):
            self._warn("warning: the trace of the profile was not collected in time, so the profile has no operations")
            # The thread ends when the trace is collected, and keeps nothing.
            self._is_late, self.traces = True, {}

    def pull_began(self, phase: str) -> None:
        """Note that the program asks for one or more batches of a phase; called on the program's thread."""
        if phase not in self._first_drawn:
            self._first_drawn[phase] = self._begun[phase]
        self.batches_drawn(phase, 1)

    def batches_drawn(self, phase: str, count: int) -> None:
        """Note that so many more batches of a phase begin; called on the program's thread."""
        self._begun[phase] += count
        # Waking the thread for every batch would cost a fast program more than its step.
        if self._is_awaited():
            self._changed.set()

    def _due(self) -> str | None:
        """Return the phase whose window begins now, None if none does."""
        begun = self._begun
        for phase, window in tuple(self._windows.items()):
            if begun[TRAIN] >= window.after or (phase == VALID and begun[VALID]):
                return phase
        return None

    def _is_due(self) -> bool:
        return self._due() is not None

    def _work(self) -> None:
        try:
            while self._windows and self._wait_for(self._is_due):
                phase = self._due()
                assert phase is not None
                self._trace(phase, self._windows.pop(phase))
        except Exception as error:  # noqa: BLE001 - a profile never stops a run
            self._warn(
                f"warning: the operations could not be traced ({type(error).__name__}: {error}); if your own code "
                "traces with jax's profiler, end its trace before the run, or run without --profile"
            )

    def _wait_for(
        self, condition: Callable[[], bool], timeout_s: float = math.inf, is_full: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until a condition holds; return False if the loop, the time or the memory is over first."""
        self._is_awaited = condition
        deadline = time.monotonic() + timeout_s
        try:
            while not self._is_over and not condition():
                left_s = deadline - time.monotonic()
                if left_s <= 0 or is_full():
                    return False
                self._changed.wait(min(left_s, _LOOK_EVERY_S))
                self._changed.clear()
            return not self._is_over
        finally:
            # Nothing is awaited while a trace is collected, or when the windows are over.
            self._is_awaited = _never

    def _trace(self, phase: str, window: Window) -> None:
        begun = self._begun
        is_full = _memory_limit()
        stop = _start()
        self._first_drawn = {}
        first = dict(begun)
        num_batches = min(window.num_batches, _MOST_BATCHES)
        timeout_s = _MOST_CHOSEN_S if window.is_chosen else _MOST_TRACED_S
        limit = None if num_batches == window.num_batches else quantity(num_batches, "batch")

        def is_done() -> bool:
            is_resumed = phase == VALID and begun[VALID] > first[VALID] and begun[TRAIN] > first[TRAIN] + 1
            return is_resumed or begun[phase] >= first[phase] + window.end(num_batches)

        try:
            if not self._wait_for(is_done, timeout_s, is_full):
                least = first[phase] + (window.end(_LEAST_BATCHES) if phase == TRAIN else 0)
                limit = f"{_MOST_TRACE_BYTES >> 20:,} MiB" if is_full() else f"{timeout_s:g} s"
                self._wait_for(lambda: begun[phase] >= least, is_full=is_full)
                limit = None if self._is_over else limit
        finally:
            data = stop()
        if self._is_late:
            return
        # A pull of several batches that had begun before the trace is not in it.
        self.traces[phase] = Trace(first | self._first_drawn, data, limit)
        if begun[VALID] > first[VALID] + 1:
            # The trace has an evaluation, whosever window it was.
            self._windows.pop(VALID, None)


def _never() -> bool:
    return False


def _memory_limit() -> Callable[[], bool]:
    """Return a function that tells whether the process has taken more memory since than a trace may have."""
    before = process_memory_bytes() or 0
    return lambda: (process_memory_bytes() or 0) - before > _MOST_TRACE_BYTES


def _start() -> Callable[[], Any]:
    """Begin to trace; return the function that ends it and returns the `jax.profiler.ProfileData`."""
    import jax

    options = jax.profiler.ProfileOptions()
    # Python's own calls would slow the threads that read, and nothing here needs them.
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    options.enable_hlo_proto = False
    if (session_type := getattr(jax.profiler, "ProfileSession", None)) is not None:
        # Without a folder, it does not convert the trace for other viewers, which takes seconds.
        session = session_type(profiler_options=options)
        session.start()
        return session.stop
    folder = tempfile.TemporaryDirectory(prefix="loopfeed-profile-")
    jax.profiler.start_trace(folder.name, profiler_options=options)

    def stop() -> Any:
        with folder:
            jax.profiler.stop_trace()
            found = sorted(Path(folder.name).rglob("*.xplane.pb"))
            if not found:
                raise FileNotFoundError("jax's profiler wrote no trace")
            return jax.profiler.ProfileData.from_file(str(found[0]))

    return stop
