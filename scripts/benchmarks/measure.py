"""Interleaved measurement, and the arithmetic of its ratios.

In each round every candidate runs once, in a rotating order, so that other load on the machine affects all equally.
Ratios are computed within each round; their median and quartiles over the rounds are reported.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from scripts.benchmarks.worker import Sample, WorkerError

_MOST_UNITS = 1 << 30
_GROWTH = 16


class Quartiles(NamedTuple):
    """Lower quartile, median and upper quartile, linearly interpolated."""

    q1: float
    median: float
    q3: float

    @property
    def spread(self) -> float:
        """Half the interquartile range as a fraction of the median."""
        return (self.q3 - self.q1) / 2 / self.median if self.median else 0.0


class Runner(Protocol):
    """Something that is measured; `worker.Worker` is one."""

    def run(self, num_units: int, timeout_s: float) -> Sample:
        """Do ``num_units`` units of work."""
        ...


@dataclass
class Measured:
    """The measurements of one candidate.

    Attributes:
        amount: amount per unit of work.
        num_units: units per round.
        samples: samples by round; None for a round without one.
        reason: why the candidate was left out; empty if it was not.
    """

    amount: float
    num_units: int = 0
    samples: list[Sample | None] = field(default_factory=list)
    reason: str = ""

    @property
    def speeds(self) -> list[float | None]:
        """Amounts per second, by round."""
        return [sample and self.amount * self.num_units / sample.seconds for sample in self.samples]

    @property
    def known_speeds(self) -> list[float]:
        """The speeds of the rounds with a sample."""
        return [speed for speed in self.speeds if speed is not None]


def quartiles(values: Sequence[float]) -> Quartiles | None:
    """Return the quartiles of the values, or None if there are none."""
    if not values:
        return None
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(q1, median, q3)


def ratios(base: Sequence[float | None], other: Sequence[float | None]) -> list[float]:
    """Return the base's speed divided by the other's for every round that has both."""
    return [ours / theirs for ours, theirs in zip(base, other, strict=False) if ours is not None and theirs is not None]


def rotated(names: Sequence[str], round_number: int) -> list[str]:
    """Return the order of a round (from 0); each round starts with the next name."""
    start = round_number % len(names) if names else 0
    return [*names[start:], *names[:start]]


def calibrate(runner: Runner, round_s: float, timeout_s: float) -> int:
    """Return the number of units, at least one, that take about `round_s` seconds.

    Raises:
        WorkerError: raised by the runner.
    """
    num_units = 1
    while True:
        seconds = runner.run(num_units, timeout_s).seconds
        wanted = round_s * num_units / seconds
        # A quarter of a round is long enough to be reliable. Otherwise increase the units by at most this factor.
        if seconds >= round_s / 4 or num_units >= _MOST_UNITS:
            return max(1, min(_MOST_UNITS, round(wanted)))
        num_units = max(num_units + 1, min(int(wanted), num_units * _GROWTH))


def measure(
    runners: Mapping[str, Runner],
    results: Mapping[str, Measured],
    *,
    repeats: int,
    round_s: float,
    timeouts_s: Mapping[str, float],
    until: float = math.inf,
    on_round: Callable[[int], None] = lambda _: None,
) -> None:
    """Measure all runners for `repeats` rounds; a runner that fails is left out from then on, with the reason.

    A round that would not end in time, judging by the one before, is not begun.

    Args:
        runners: runners by name.
        results: results by the same names, filled in here.
        repeats: number of rounds.
        round_s: target duration of a runner's round, in seconds.
        timeouts_s: time limit of a runner's round, in seconds, by name.
        until: the time at which all must have ended, by `time.monotonic`.
        on_round: called with the number of each round (from 0) before it starts.
    """
    for name, runner in runners.items():
        try:
            results[name].num_units = calibrate(runner, round_s, _limited(timeouts_s[name], until))
        except WorkerError as error:
            results[name].reason = str(error)
    longest_s = 0.0
    for round_number in range(repeats):
        started = time.monotonic()
        if started + longest_s >= until:
            break
        on_round(round_number)
        for name in rotated(list(runners), round_number):
            result = results[name]
            sample = None
            if not result.reason:
                try:
                    sample = runners[name].run(result.num_units, _limited(timeouts_s[name], until))
                except WorkerError as error:
                    result.reason = str(error)
            result.samples.append(sample)
        longest_s = max(longest_s, time.monotonic() - started)
    for name in runners:
        if not results[name].reason and not results[name].samples:
            results[name].reason = "left out, because no time was left for a round"


def _limited(timeout_s: float, until: float) -> float:
    """Return a time limit that ends at ``until`` at the latest."""
    return min(timeout_s, max(0.0, until - time.monotonic()))
