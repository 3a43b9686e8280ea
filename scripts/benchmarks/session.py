"""The run of a case: its candidates are started one by one, measured together and killed together."""

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopfeed.preprocess.cores import num_cores
from scripts.benchmarks.bench import Candidate, Case, Settings
from scripts.benchmarks.hardware import load_average
from scripts.benchmarks.measure import Measured, Quartiles, Runner, measure, quartiles, ratios
from scripts.benchmarks.neighbour import BesideNeighbour, Neighbour, fair_share
from scripts.benchmarks.peers import PeerError, ensure_peer
from scripts.benchmarks.worker import Ready, Worker, WorkerError

ROOT = Path(__file__).parents[2]
# The time kept for the rounds, while candidates are prepared in a limited time, relative to the rounds' own.
_ROUNDS_MARGIN = 1.5


@dataclass
class Row:
    """One candidate's line of a result.

    Attributes:
        candidate: the candidate.
        measured: its samples, or the reason why there are none.
        ready: its ready message; None if it was not ready.
        speed: amounts per second over the rounds, None if there are none.
        ratio: ratio of the base's speed to its own, by round; None for the base, beside a neighbour, or if there is
            none.
        kept: beside a neighbour, the ratio of its speed to its share of its speed alone, by round; otherwise None.
        differs: facts in which it differs from the base; empty if no difference is known.
    """

    candidate: Candidate
    measured: Measured
    ready: Ready | None
    speed: Quartiles | None = None
    ratio: Quartiles | None = None
    kept: Quartiles | None = None
    differs: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the median reaches the target; None if there is no target or nothing to compare with it."""
        seen = self.kept if self.candidate.beside else self.ratio
        if self.candidate.target is None or seen is None:
            return None
        return seen.median >= self.candidate.target

    def values(self) -> dict[str, float]:
        """Return the medians of the values that the candidate recorded besides its seconds."""
        samples = [sample for sample in self.measured.samples if sample is not None]
        names = dict.fromkeys(name for sample in samples for name in sample.values)
        found = {name: quartiles([s.values[name] for s in samples if name in s.values]) for name in names}
        return {name: each.median for name, each in found.items() if each is not None}

    def to_json(self) -> dict[str, Any]:
        """Return all results as JSON, with every sample."""
        measured, ready = self.measured, self.ready
        return {
            "name": self.candidate.name,
            "script": self.candidate.script,
            "arguments": list(self.candidate.arguments),
            "environment": dict(self.candidate.environment),
            "peer": self.candidate.peer or None,
            "beside_neighbour": self.candidate.beside or None,
            "reason": measured.reason or None,
            "differs": self.differs or None,
            "versions": ready.versions if ready else {},
            "facts": ready.facts if ready else {},
            "prepare_s": ready.prepare_s if ready else None,
            "amount": measured.amount,
            "units_a_round": measured.num_units,
            "samples_s": [sample and sample.seconds for sample in measured.samples],
            "values": [sample and sample.values for sample in measured.samples],
            "medians": self.values(),
            "speeds": measured.speeds,
            "speed": self.speed and self.speed._asdict(),
            "base_is_times_as_fast": self.ratio and self.ratio._asdict(),
            "keeps_of_its_share": self.kept and self.kept._asdict(),
            "target": self.candidate.target,
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
        return any(row.candidate.name == self.case.base and row.speed is not None for row in self.rows)

    def complaints(self) -> list[str]:
        """Return the reasons why candidates failed, and what those that do different work do."""
        failed = [f"{row.candidate.name}: {row.measured.reason}" for row in self.rows if row.measured.reason]
        different = f"does different work than {self.case.base}"
        return failed + [f"{row.candidate.name}: {different}: {row.differs}" for row in self.rows if row.differs]

    def to_json(self) -> dict[str, Any]:
        """Return all results as JSON."""
        unit = self.case.unit._asdict()
        return {
            "name": self.case.name,
            "unit": unit,
            "base": self.case.base,
            "round_s": self.case.round_s,
            "load_before": self.load_before,
            "load_after": self.load_after,
            "candidates": [r.to_json() for r in self.rows],
        }


def run_case(case: Case, settings: Settings, *, say: Callable[[str], None], until: float = math.inf) -> CaseResult:
    """Prepare, measure and kill the candidates of a case; a failed candidate gets a row with the reason.

    ``until`` is the time at which all must have ended, by `time.monotonic`: a candidate whose preparation would leave
    no time for the rounds gets the reason, and rounds that do not fit are left out.
    """
    rows = [Row(candidate, Measured(amount=1.0), None) for candidate in case.candidates]
    try:
        case.prepare(say)
    except (ValueError, OSError, RuntimeError) as error:
        for row in rows:
            row.measured.reason = f"its data could not be created: {error}"
        return CaseResult(case, rows)
    load_before = load_average()
    with ExitStack() as stack:
        runners = _prepare(case, rows, settings, stack, say, until)
        measure(
            runners,
            {row.candidate.name: row.measured for row in rows},
            repeats=settings.repeats,
            round_s=case.round_s,
            timeouts_s={candidate.name: candidate.round_timeout_s for candidate in case.candidates},
            until=until,
            on_round=lambda number: say(f"{case.name}: round {number + 1} of {settings.repeats}"),
        )
    summarise(case, rows)
    return CaseResult(case, rows, load_before, load_average())


def _prepare(
    case: Case, rows: list[Row], settings: Settings, stack: ExitStack, say: Callable[[str], None], until: float
) -> dict[str, Runner]:
    """Start the candidates of a case, and return those that are ready by name; the others get their reason."""
    runners: dict[str, Runner] = {}
    neighbour = stack.enter_context(Neighbour()) if any(candidate.beside for candidate in case.candidates) else None
    by_name = {row.candidate.name: row for row in rows}
    for row in rows:
        name, alone = row.candidate.name, row.candidate.beside
        if neighbour is not None and alone:
            row.ready = by_name[alone].ready
            if alone in runners:
                runners[name] = BesideNeighbour(runners[alone], neighbour)
            else:
                row.measured.reason = f"{alone} was not ready"
        else:
            rounds_s = _ROUNDS_MARGIN * settings.repeats * case.round_s * (len(runners) + 1)
            limit_s = min(row.candidate.prepare_timeout_s, until - time.monotonic() - rounds_s)
            if limit_s <= 0:
                row.measured.reason = "left out, because its preparation would leave no time for the rounds"
                continue
            say(f"{case.name}: preparing {name}")
            try:
                worker = _start(row.candidate, case, settings, stack, say)
                row.ready = worker.wait_ready(limit_s)
                runners[name] = worker
            except (WorkerError, PeerError, OSError) as error:
                row.measured.reason = str(error)
        if row.ready is not None:
            row.measured.amount = row.ready.amount
    return runners


def summarise(case: Case, rows: list[Row]) -> None:
    """Fill in the speeds, the ratios, and the facts in which candidates differ from the base."""
    by_name = {row.candidate.name: row for row in rows}
    base = by_name[case.base]
    share = fair_share(num_cores())
    for row in rows:
        row.speed = quartiles(row.measured.known_speeds)
        if row.candidate.beside:
            alone = by_name[row.candidate.beside].measured
            row.kept = quartiles([ratio / share for ratio in ratios(row.measured.speeds, alone.speeds)])
        elif row is not base:
            row.ratio = quartiles(ratios(base.measured.speeds, row.measured.speeds))
            row.differs = _differences(case, base, row)


def _differences(case: Case, base: Row, row: Row) -> str:
    ours, theirs = (each.ready.facts if each.ready else {} for each in (base, row))
    different = [
        f"{name} {theirs[name]} instead of {ours[name]}"
        for name in case.agree
        if name in ours and name in theirs and not math.isclose(ours[name], theirs[name], rel_tol=case.agree_to)
    ]
    return ", ".join(different)


def _start(
    candidate: Candidate, case: Case, settings: Settings, stack: ExitStack, say: Callable[[str], None]
) -> Worker:
    logs = settings.folder / "logs"
    # What this process has on its path, such as packages in a folder of their own, the candidates need too.
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment |= dict(candidate.environment)
    if candidate.peer:
        python = ensure_peer(candidate.peer, settings.folder, say=say)
        command = candidate.command(str(python))
        # Another Python must not see this one's packages.
        del environment["PYTHONPATH"]
    else:
        command = candidate.command()
    log = logs / f"{_file_name(case.name)}.{_file_name(candidate.name)}.log"
    return stack.enter_context(Worker(command, log, environment=environment, cwd=settings.folder))


def _file_name(name: str) -> str:
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name).split())
