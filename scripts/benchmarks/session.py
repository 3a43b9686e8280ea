"""The run of a case: its candidates are started one by one, take turns, and are killed together.

In each round every candidate works once, in a rotating order, so that other load on the machine affects all equally.
Ratios are computed within each round; their median and quartiles over the rounds are reported.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from loopfeed.preprocess.control_groups import num_cores
from scripts.benchmarks.bench import AGREED, Candidate, Case, Settings
from scripts.benchmarks.hardware import load_average
from scripts.benchmarks.peers import PeerError, ensure_peer
from scripts.benchmarks.worker import Ready, Run, Sample, Worker, WorkerError

ROOT = Path(__file__).parents[2]
# The name of a variable: see `candidates/protocol.py`.
_NEIGHBOUR = "LOOPFEED_BENCH_NEIGHBOUR"
# The time limit of one answer.
_ROUND_TIMEOUT_S = 300.0
# The time kept for the rounds, while candidates are prepared in a limited time, relative to the rounds' own.
_ROUNDS_MARGIN = 1.5
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


def quartiles(values: Sequence[float]) -> Quartiles | None:
    """Return the quartiles of the values, or None if there are none."""
    if len(values) < 2:
        return Quartiles(values[0], values[0], values[0]) if values else None
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass
class Row:
    """One candidate's line of a result.

    Attributes:
        candidate: the candidate.
        ready: its ready message; None if it was not ready.
        run: does units of its work.
        num_units: units per round.
        samples: samples by round; None for a round without one.
        reason: why the candidate was left out; empty if it was not.
        ratio: ratio of the base's speed to its own, by round; None for the base, beside a neighbour, or if there is
            none.
        kept: beside a neighbour, the ratio of its speed to its share of its speed alone, by round; otherwise None.
        differs: facts in which it differs from the base; empty if no difference is known.
    """

    candidate: Candidate
    ready: Ready | None = None
    run: Run | None = None
    num_units: int = 0
    samples: list[Sample | None] = field(default_factory=list)
    reason: str = ""
    ratio: Quartiles | None = None
    kept: Quartiles | None = None
    differs: str = ""

    @property
    def amount(self) -> float:
        """Amount per unit of work."""
        return self.ready.amount if self.ready else 1.0

    @property
    def speeds(self) -> list[float | None]:
        """Amounts per second, by round."""
        return [sample and self.amount * self.num_units / sample.seconds for sample in self.samples]

    @property
    def speed(self) -> Quartiles | None:
        """Amounts per second over the rounds, None if there are none."""
        return quartiles([speed for speed in self.speeds if speed is not None])

    @property
    def is_met(self) -> bool | None:
        """Whether the median reaches the target; None if there is no target or nothing to compare with it."""
        seen = self.kept if self.candidate.beside else self.ratio
        if self.candidate.target is None or seen is None:
            return None
        return seen.median >= self.candidate.target

    def work(self, num_units: int, until: float) -> Sample | None:
        """Do units of work, by `until` at the latest; None if the candidate has failed, now or before."""
        if self.reason or self.run is None:
            return None
        try:
            return self.run(num_units, min(_ROUND_TIMEOUT_S, max(0.0, until - time.monotonic())))
        except WorkerError as error:
            self.reason = str(error)
            return None

    def medians(self) -> dict[str, float]:
        """Return the medians of the values that the candidate recorded besides its seconds."""
        recorded = [sample.values for sample in self.samples if sample is not None]
        names = dict.fromkeys(name for values in recorded for name in values)
        return {name: statistics.median(values[name] for values in recorded if name in values) for name in names}

    def to_json(self) -> dict[str, Any]:
        """Return all results as JSON, with every sample."""
        candidate, ready = self.candidate, self.ready
        return {
            "name": candidate.name,
            "script": candidate.script,
            "arguments": [*map(str, candidate.arguments)],
            "environment": dict(candidate.environment),
            "peer": candidate.peer or None,
            "beside_neighbour": candidate.beside or None,
            "reason": self.reason or None,
            "differs": self.differs or None,
            "versions": ready.versions if ready else {},
            "facts": ready.facts if ready else {},
            "prepare_s": ready.prepare_s if ready else None,
            "amount": self.amount,
            "units_a_round": self.num_units,
            "samples_s": [sample and sample.seconds for sample in self.samples],
            "values": [sample and sample.values for sample in self.samples],
            "medians": self.medians(),
            "speeds": self.speeds,
            "speed": self.speed and self.speed._asdict(),
            "base_is_times_as_fast": self.ratio and self.ratio._asdict(),
            "keeps_of_its_share": self.kept and self.kept._asdict(),
            "target": candidate.target,
            "is_met": self.is_met,
        }


@dataclass
class CaseResult:
    """A measured case: its rows in the order of its candidates, and the load averages before and after it."""

    case: Case
    rows: list[Row]
    load_before: list[float] | None = None
    load_after: list[float] | None = None

    @property
    def has_base(self) -> bool:
        """Whether the candidate that the others are compared with was measured."""
        return self.rows[0].speed is not None

    def complaints(self) -> list[str]:
        """Return the reasons why candidates failed, and what those that do different work do."""
        failed = [f"{row.candidate.name}: {row.reason}" for row in self.rows if row.reason]
        different = f"does different work than {self.case.base}"
        return failed + [f"{row.candidate.name}: {different}: {row.differs}" for row in self.rows if row.differs]

    def to_json(self) -> dict[str, Any]:
        """Return all results as JSON."""
        return {
            "name": self.case.name,
            "unit": self.case.unit._asdict(),
            "base": self.case.base,
            "round_s": self.case.round_s,
            "load_before": self.load_before,
            "load_after": self.load_after,
            "candidates": [row.to_json() for row in self.rows],
        }


def run_case(case: Case, settings: Settings, *, say: Callable[[str], None], until: float = math.inf) -> CaseResult:
    """Prepare, measure and kill the candidates of a case; a failed candidate gets a row with the reason.

    ``until`` is the time at which all must have ended, by `time.monotonic`: a candidate whose preparation would leave
    no time for the rounds gets the reason, and rounds that do not fit are left out.
    """
    rows = [Row(candidate) for candidate in case.candidates]
    try:
        case.prepare(say)
    except (ValueError, OSError, RuntimeError) as error:
        for row in rows:
            row.reason = f"its data could not be created: {error}"
        return CaseResult(case, rows)
    load_before = load_average()
    with ExitStack() as stack:
        _prepare(case, rows, settings, stack, say, until)
        on_round = partial(_say_round, say, case.name, settings.repeats)
        measure(rows, repeats=settings.repeats, round_s=case.round_s, until=until, on_round=on_round)
    compare(rows, case.agree_to)
    return CaseResult(case, rows, load_before, load_average())


def _say_round(say: Callable[[str], None], name: str, repeats: int, number: int) -> None:
    say(f"{name}: round {number + 1} of {repeats}")


def _prepare(
    case: Case, rows: list[Row], settings: Settings, stack: ExitStack, say: Callable[[str], None], until: float
) -> None:
    """Start the candidates of a case; those that cannot be ready get their reason."""
    num_ready = 0
    for row in rows:
        rounds_s = _ROUNDS_MARGIN * settings.repeats * case.round_s * (num_ready + 1)
        limit_s = min(row.candidate.prepare_timeout_s, until - time.monotonic() - rounds_s)
        if limit_s <= 0:
            row.reason = "left out, because its preparation would leave no time for the rounds"
            continue
        say(f"{case.name}: preparing {row.candidate.name}")
        try:
            worker = stack.enter_context(_start(row.candidate, case, settings, say))
            row.ready, row.run = worker.wait_ready(limit_s), worker.run
            num_ready += 1
        except (WorkerError, PeerError, OSError) as error:
            row.reason = str(error)


def _start(candidate: Candidate, case: Case, settings: Settings, say: Callable[[str], None]) -> Worker:
    # What this process has on its path, such as packages in a folder of their own, the candidates need too.
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = candidate.command()
    if candidate.peer:
        command = candidate.command(str(ensure_peer(candidate.peer, settings.folder, say=say)))
        # Another Python must not see this one's packages.
        del environment["PYTHONPATH"]
    if candidate.beside:
        environment[_NEIGHBOUR] = "1"
    log = settings.folder / "logs" / f"{_file_name(case.name)}.{_file_name(candidate.name)}.log"
    return Worker(command, log, environment=environment | dict(candidate.environment), cwd=settings.folder)


def _file_name(name: str) -> str:
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name).split())


def measure(
    rows: Sequence[Row],
    *,
    repeats: int,
    round_s: float,
    until: float = math.inf,
    on_round: Callable[[int], None] = lambda _: None,
) -> None:
    """Measure all rows for `repeats` rounds; a candidate that fails is left out from then on, with the reason.

    A round that would not end in time, judging by the one before, is not begun.

    Args:
        rows: their samples, or reasons, are filled in here.
        repeats: number of rounds.
        round_s: target duration of a candidate's round, in seconds.
        until: the time at which all must have ended, by `time.monotonic`.
        on_round: called with the number of each round (from 0) before it starts.
    """
    rows = [row for row in rows if row.run is not None]
    for row in rows:
        _calibrate(row, round_s, until)
    longest_s = 0.0
    for number in range(repeats):
        started = time.monotonic()
        if started + longest_s >= until:
            break
        on_round(number)
        first = number % len(rows) if rows else 0
        for row in (*rows[first:], *rows[:first]):
            row.samples.append(row.work(row.num_units, until))
        longest_s = max(longest_s, time.monotonic() - started)
    for row in rows:
        if not row.reason and not row.samples:
            row.reason = "left out, because no time was left for a round"


def _calibrate(row: Row, round_s: float, until: float) -> None:
    """Find the number of units, at least one, that take about `round_s` seconds."""
    row.num_units = 1
    while (sample := row.work(row.num_units, until)) is not None:
        wanted = round_s * row.num_units / sample.seconds
        # A quarter of a round is long enough to be reliable. Otherwise increase the units by at most this factor.
        if sample.seconds >= round_s / 4 or row.num_units >= _MOST_UNITS:
            row.num_units = max(1, min(_MOST_UNITS, round(wanted)))
            return
        row.num_units = max(row.num_units + 1, min(int(wanted), row.num_units * _GROWTH))


def compare(rows: Sequence[Row], agree_to: float) -> None:
    """Fill in the ratios, and the facts in which candidates differ from the first, the base."""
    base, by_name = rows[0], {row.candidate.name: row for row in rows}
    # Of a scheduler which treats threads alike, as Linux does within one session, to which all processes belong: of
    # n + 1 threads that always want to run on n cores, each gets n / (n + 1) of a core. So a program with a thread for
    # each core should keep n / (n + 1) of its speed beside a busy thread: two thirds on two cores. It loses more if its
    # threads wait for the one that was interrupted, or spin meanwhile.
    share = num_cores() / (num_cores() + 1)
    for row in rows[1:]:
        if row.candidate.beside:
            alone = by_name[row.candidate.beside]
            row.kept = quartiles([ratio / share for ratio in _ratios(row, alone)])
            continue
        row.ratio = quartiles(_ratios(base, row))
        ours, theirs = (each.ready.facts if each.ready else {} for each in (base, row))
        row.differs = ", ".join(
            f"{name} {theirs[name]} instead of {ours[name]}"
            for name in AGREED
            if name in ours and name in theirs and not math.isclose(ours[name], theirs[name], rel_tol=agree_to)
        )


def _ratios(row: Row, other: Row) -> list[float]:
    """Return a row's speed divided by the other's for every round that has both."""
    both = zip(row.speeds, other.speeds, strict=False)
    return [ours / theirs for ours, theirs in both if ours is not None and theirs is not None]
