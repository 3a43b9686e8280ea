"""The clock of one launch: when its phases began and ended."""

import time


class LaunchClock:
    """Times the phases of a launch; made when the launch begins.

    Attributes:
        started: Unix time of the beginning, in seconds.
        compile_s: seconds of tracing, compiling and initialising.
        end_wait_s: seconds that the run waited for the disk after its last step.
    """

    def __init__(self) -> None:
        self.started, self._began = time.time(), time.perf_counter()
        self.compile_s = self.end_wait_s = 0.0
        self._loop_began: float | None = None
        self._loop_ended: float | None = None
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether the loop has ended by itself, not by an error or a second signal."""
        return self._is_over

    @property
    def total_s(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._began

    @property
    def loop_s(self) -> float:
        """Seconds that the loop has run so far."""
        if self._loop_began is None:
            return 0.0
        return (self._loop_ended or time.perf_counter()) - self._loop_began

    @property
    def now_or_loop_end(self) -> float:
        """The end of the loop, or now while it runs, by `time.perf_counter`."""
        return self._loop_ended or time.perf_counter()

    @property
    def is_looping(self) -> bool:
        """Whether the loop runs."""
        return self._loop_began is not None and self._loop_ended is None

    @property
    def is_ending(self) -> bool:
        """Whether the loop has ended."""
        return self._loop_ended is not None

    def begin_loop(self) -> None:
        """Note that the loop begins."""
        self._loop_began = time.perf_counter()

    def end_loop(self, *, is_over: bool) -> None:
        """Note that the loop has ended, by itself or not."""
        self._loop_ended, self._is_over = time.perf_counter(), is_over
