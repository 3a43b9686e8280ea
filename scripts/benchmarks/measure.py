"""Interleaved measuring, and the arithmetic of its ratios.

In each round every candidate runs once, in an order that rotates, so that what else the machine does meets all alike.
A ratio is taken within each round; what is reported is its median and quartiles over the rounds.
"""

import statistics
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
        """Half the distance of the quartiles as a part of the median."""
        return (self.q3 - self.q1) / 2 / self.median if self.median else 0.0


class Runner(Protocol):
    """What is measured; `worker.Worker` is one."""

    def run(self, num_units: int, timeout_s: float) -> Sample:
        """Does so many units of its work."""
        ...


@dataclass
class Measured:
    """What came of one candidate.

    Attributes:
        amount: what a unit of its work comes to.
        num_units: units of a round.
        samples: by round; None where it gave none.
        reason: why it was left out; empty where it was not.
    """

    amount: float
    num_units: int = 0
    samples: list[Sample | None] = field(default_factory=list)
    reason: str = ""

    @property
    def speeds(self) -> list[float | None]:
        """Amounts a second, by round."""
        return [sample and self.amount * self.num_units / sample.seconds for sample in self.samples]

    @property
    def known_speeds(self) -> list[float]:
        """The speeds of the rounds that gave one."""
        return [speed for speed in self.speeds if speed is not None]


def quartiles(values: Sequence[float]) -> Quartiles | None:
    """Gives the quartiles of at least one value, None of none."""
    if not values:
        return None
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(q1, median, q3)


def ratios(base: Sequence[float | None], other: Sequence[float | None]) -> list[float]:
    """Divides the base's speed by the other's, round by round; rounds that lack one of the two are left out."""
    return [ours / theirs for ours, theirs in zip(base, other, strict=False) if ours is not None and theirs is not None]


def rotated(names: Sequence[str], round_number: int) -> list[str]:
    """Gives the order of a round (from 0): each next one begins with the next name."""
    start = round_number % len(names) if names else 0
    return [*names[start:], *names[:start]]


def calibrate(runner: Runner, round_s: float, timeout_s: float) -> int:
    """Finds how many units take about `round_s` seconds, at least one.

    Raises:
        WorkerError: as the runner does.
    """
    num_units = 1
    while True:
        seconds = runner.run(num_units, timeout_s).seconds
        wanted = round_s * num_units / seconds
        # A quarter of a round is long enough to trust; else no more than so many times as many units at once.
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
    on_round: Callable[[int], None] = lambda _: None,
) -> None:
    """Measures all runners for so many rounds; one that fails is left out from then on, with the reason.

    Args:
        runners: by name.
        results: of the same names; filled in.
        repeats: rounds.
        round_s: seconds that a runner is to take in a round.
        timeouts_s: that it may take, by name.
        on_round: told the number of each round (from 0) before it begins.
    """
    for name, runner in runners.items():
        try:
            results[name].num_units = calibrate(runner, round_s, timeouts_s[name])
        except WorkerError as error:
            results[name].reason = str(error)
    for round_number in range(repeats):
        on_round(round_number)
        for name in rotated(list(runners), round_number):
            result = results[name]
            sample = None
            if not result.reason:
                try:
                    sample = runners[name].run(result.num_units, timeouts_s[name])
                except WorkerError as error:
                    result.reason = str(error)
            result.samples.append(sample)
