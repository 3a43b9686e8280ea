"""Collects durations of repeated events in a histogram of fixed size, which gives their percentiles."""

import math
from dataclasses import dataclass
from math import frexp

# Four buckets per factor of two, from 2**-20 s (a microsecond) to 2**12 s (an hour). The mantissa of a number says the
# bucket, at half the price of a logarithm.
_PER_OCTAVE, _LEAST_EXPONENT, _MOST_EXPONENT = 4, -19, 12
_LEAST_S = 2.0 ** (_LEAST_EXPONENT - 1)


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


class Durations:
    """A histogram of durations; one thread adds, any thread may read.

    Attributes:
        count: number of durations.
        total_s, max_s: their sum and the largest, in seconds.
    """

    __slots__ = ("_buckets", "count", "max_s", "total_s")

    def __init__(self) -> None:
        # The first bucket is for less than the least, the last one for all that is longer than the others.
        self._buckets = [0] * (_PER_OCTAVE * (_MOST_EXPONENT - _LEAST_EXPONENT + 1) + 2)
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
        mantissa, exponent = frexp(seconds)
        if exponent > _MOST_EXPONENT:
            self._buckets[-1] += 1
        else:
            # 8 · mantissa is from 4 up to 8.
            self._buckets[_PER_OCTAVE * (exponent - _LEAST_EXPONENT) + int(8 * mantissa) - 3] += 1

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
