"""Collects durations of repeated events in a histogram of fixed size, which gives their percentiles."""

import math
from dataclasses import dataclass

# Four buckets per factor of two, so that each is 19 % wide, from a microsecond to 2**30 of them (18 minutes).
_PER_OCTAVE, _OCTAVES, _LEAST_S = 4, 30, 1e-6


@dataclass(frozen=True)
class Times:
    """The durations of repeated events.

    Percentiles come from a histogram whose buckets are 19 % wide; they are upper bounds of their bucket.

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


class Durations:
    """A histogram of durations; one thread adds, any thread may read.

    Attributes:
        count: number of durations.
        total_s, max_s: their sum and the largest, in seconds.
    """

    __slots__ = ("_buckets", "count", "max_s", "total_s")

    def __init__(self) -> None:
        # The first bucket is for less than a microsecond, the last one for all that is longer than the others.
        self._buckets = [0] * (_PER_OCTAVE * _OCTAVES + 2)
        self.count, self.total_s, self.max_s = 0, 0.0, 0.0

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
        self._buckets[min(1 + int(_PER_OCTAVE * math.log2(seconds / _LEAST_S)), len(self._buckets) - 1)] += 1

    def percentile_s(self, percent: float) -> float:
        """Return an upper bound of a percentile that is at most 19 % too large, 0 without durations."""
        rank, seen = math.ceil(self.count * percent / 100), 0
        for number, count in enumerate(list(self._buckets)):
            seen += count
            if seen >= rank and count:
                if number in (0, len(self._buckets) - 1):
                    return self.max_s if number else 0.0
                return min(self.max_s, _LEAST_S * 2 ** (number / _PER_OCTAVE))
        return 0.0

    def summary(self) -> Times:
        """Return the durations so far in short."""
        p50_s, p90_s, p99_s = (self.percentile_s(percent) for percent in (50, 90, 99))
        return Times(self.count, self.total_s, p50_s, p90_s, p99_s, self.max_s)
