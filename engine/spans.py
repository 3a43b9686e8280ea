"""Spans of time by name, each recorded once, by the part that it belongs to, in a histogram of fixed size.

The record of a launch, its verdict, the watchdog and the profile read them.
"""

import math
import time
from dataclasses import dataclass, replace
from math import frexp
from time import perf_counter

# Four buckets per factor of two, from 2**-20 s (a microsecond) to 2**12 s (an hour). The mantissa of a number says the
# bucket, at half the price of a logarithm.
_PER_OCTAVE, _LEAST_EXPONENT, _MOST_EXPONENT = 4, -19, 12
_LEAST_S = 2.0 ** (_LEAST_EXPONENT - 1)

COMPILING, LOOP, END = "compiling", "loop", "end"
"""Tracing, compiling and initialising; the loop; and the wait for the disk after its last step."""
STEP_WAIT = "step wait"
"""A step's wait for its batches."""
PUSH, SNAPSHOT_PUSH = "push", "snapshot push"
"""A push on the host; and that of a snapshot."""
EVALUATION, SNAPSHOT = "evaluation", "snapshot"
"""What an evaluation or a snapshot takes of the loop, from the push before to that of its result."""
SINK, CLOSE = "sink ", "close"
"""Waiting for a sink whose name follows; and what of that is after the loop."""


@dataclass(frozen=True)
class Times:
    """The durations of repeated events.

    Percentiles are the upper bounds of the buckets of a histogram, which are at most 25 % wide.

    Attributes:
        count: number of events.
        total_s: sum of their durations.
        p50_s, p90_s, p99_s: percentiles, 0 without events.
        max_s: the longest duration.
    """

    count: int = 0
    total_s: float = 0.0
    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0


class Span:
    """What was spent on one thing; one thread records, any thread reads.

    Attributes:
        count: how often it was done.
        total_s, max_s: the sum of the durations and the largest, in seconds.
        since: when it began, if it goes on, by `time.perf_counter`; otherwise None.
        ended_at: when it ended last, None if it never did.
    """

    __slots__ = ("_buckets", "count", "ended_at", "max_s", "since", "total_s")

    def __init__(self) -> None:
        # The first bucket is for less than the least, the last one for all that is longer than the others.
        self._buckets = [0] * (_PER_OCTAVE * (_MOST_EXPONENT - _LEAST_EXPONENT + 1) + 2)
        self.count, self.total_s, self.max_s = 0, 0.0, 0.0
        self.since: float | None = None
        self.ended_at: float | None = None

    def begin(self) -> None:
        """Note that it begins."""
        self.since = perf_counter()

    def end(self) -> float:
        """Note that it ends, and return how long it took, in seconds."""
        now, since = perf_counter(), self.since
        took = 0.0 if since is None else now - since
        self.since, self.ended_at = None, now
        self.add(took)
        return took

    def add(self, seconds: float) -> None:
        """Add a duration of 0 seconds or more."""
        self.count += 1
        if seconds < _LEAST_S:
            self._buckets[0] += 1
            self.total_s += seconds
            return
        self.total_s += seconds
        if seconds > self.max_s:
            self.max_s = seconds
        mantissa, exponent = frexp(seconds)
        if exponent > _MOST_EXPONENT:
            self._buckets[-1] += 1
        else:
            # 8 · mantissa is from 4 up to 8.
            self._buckets[_PER_OCTAVE * (exponent - _LEAST_EXPONENT) + int(8 * mantissa) - 3] += 1

    def until(self, now: float) -> float:
        """Return the seconds up to a time by `time.perf_counter`, those that go on included."""
        since = self.since
        return self.total_s + (0.0 if since is None else max(0.0, now - since))

    def percentile_s(self, percent: float) -> float:
        """Return an upper bound of a percentile that is at most 25 % too large, 0 without durations."""
        rank, seen = math.ceil(self.count * percent / 100), 0
        for number, count in enumerate(list(self._buckets)):
            seen += count
            if seen >= rank and count:
                if number in (0, len(self._buckets) - 1):
                    return self.max_s if number else 0.0
                octave, part = divmod(number - 1, _PER_OCTAVE)
                return min(self.max_s, _LEAST_S * 2**octave * (5 + part) / 4)
        return 0.0

    def summary(self) -> Times:
        """Return the durations so far in short."""
        p50_s, p90_s, p99_s = (self.percentile_s(percent) for percent in (50, 90, 99))
        return Times(self.count, self.total_s, p50_s, p90_s, p99_s, self.max_s)


@dataclass(frozen=True)
class StageTimes:
    """The steps that a launch made in one stage of its run.

    Attributes:
        start_step, end_step: updates done before and after.
        num_images: images of these steps.
        seconds: from the event before each step to its loss, without evaluations.
        first_step_s: of the first loss of the stage: at a border, how long it took after the last of the stage before.
    """

    start_step: int
    end_step: int
    num_images: int = 0
    seconds: float = 0.0
    first_step_s: float = 0.0

    def add(self, num_steps: int, num_images: int, seconds: float) -> "StageTimes":
        """Return the times with those of further steps."""
        return replace(
            self,
            end_step=self.end_step + num_steps,
            num_images=self.num_images + num_images,
            seconds=self.seconds + seconds,
        )


class Spans:
    """The spans of one launch, which begins when this is made.

    Attributes:
        started: Unix time of the beginning, in seconds.
    """

    def __init__(self) -> None:
        self.started, self._began = time.time(), perf_counter()
        self._spans: dict[str, Span] = {}

    def __getitem__(self, name: str) -> Span:
        """Return the span of a name, also if nothing was recorded yet; safe from any thread."""
        found = self._spans.get(name)
        return self._spans.setdefault(name, Span()) if found is None else found

    def seconds_of(self, prefix: str) -> dict[str, float]:
        """Return the seconds of the spans with a prefix that were recorded, by the rest of their names."""
        spans = dict(self._spans)
        return {name.removeprefix(prefix): each.total_s for name, each in spans.items() if name.startswith(prefix)}

    @property
    def total_s(self) -> float:
        """Seconds since the beginning."""
        return perf_counter() - self._began
