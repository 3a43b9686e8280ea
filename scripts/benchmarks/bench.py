"""The parts of a benchmark: cases, in each of which several candidates do the same work."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

CANDIDATES = Path(__file__).parent / "candidates"


class Unit(NamedTuple):
    """The unit in which a case's speeds are shown.

    Attributes:
        text: e.g. "images/s" or "µs a pull".
        scale: factor of the amount per second, or of the seconds per amount.
        is_time: whether seconds per amount are shown, so that less is better.
    """

    text: str
    scale: float = 1.0
    is_time: bool = False

    def shown(self, speed: float) -> float:
        """Convert a speed from amounts per second to this unit."""
        return self.scale / speed if self.is_time else self.scale * speed


@dataclass(frozen=True)
class Candidate:
    """One way to do a case's work: a script that speaks `candidates.protocol`.

    Attributes:
        name: name in the table.
        script: file name in `candidates/`.
        arguments: arguments of the script.
        peer: the name of its environment in `peers.PEERS`; empty if it runs on this Python.
        environment: additional environment variables of its process.
        beside: the name of an earlier candidate of the case, whose work this one does beside a busy process; empty if
            it runs alone.
        target: minimum ratio of the base's speed to this candidate's; of a candidate beside a busy process, the minimum
            part that it keeps of its share of the cores; None if there is no target.
        prepare_timeout_s: time limit for building, compiling and converting, in seconds.
    """

    name: str
    script: str
    arguments: tuple[object, ...] = ()
    peer: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    beside: str = ""
    target: float | None = None
    prepare_timeout_s: float = 900.0

    def command(self, python: str = sys.executable) -> list[str]:
        """Return the command that runs the candidate with this interpreter."""
        return [python, str(CANDIDATES / self.script), *map(str, self.arguments)]


@dataclass(frozen=True)
class Case:
    """Candidates that are compared, round by round.

    Attributes:
        name: description of the work, with its sizes.
        unit: unit of the speeds.
        candidates: in the order of the table; the first is the base, whose speed is divided by the others'. Peers are
            left out unless requested.
        round_s: target duration of a candidate's round, in seconds.
        prepare: creates the data that all candidates need, once; receives a function that prints messages. Raises
            ValueError, OSError or RuntimeError if it fails.
        agree_to: by how much the facts `AGREED` of a candidate may differ from the base's, relative to the larger one.
    """

    name: str
    unit: Unit
    candidates: tuple[Candidate, ...]
    round_s: float = 1.5
    prepare: Callable[[Callable[[str], None]], object] = lambda _: None
    agree_to: float = 1e-4

    def __post_init__(self) -> None:
        alone: list[str] = []
        for candidate in self.candidates:
            if candidate.name in alone:
                raise ValueError(f"candidates must have unique names, got {candidate.name!r} twice")
            if candidate.beside and candidate.beside not in alone:
                raise ValueError(
                    f"{candidate.name} must be beside an earlier candidate that runs alone, got {candidate.beside!r}"
                )
            if not candidate.beside:
                alone.append(candidate.name)

    @property
    def base(self) -> str:
        """The name of the base."""
        return self.candidates[0].name


AGREED = ("parameters", "first loss", "largest logit")
"""Facts in which candidates of a case must agree with the base, if both report them."""


@dataclass(frozen=True)
class Settings:
    """The user's settings.

    Attributes:
        folder: folder of environments, data and logs.
        images: a folder of class folders of JPEG files; None draws synthetic ones.
        peers: whether to measure other projects too.
        repeats: number of rounds.
        case: substring of the names of the cases to measure; empty selects all.
        round_s: target duration of a candidate's round in seconds; None uses the case's own.
        limit_s: time for everything, in seconds; what does not fit is left out. None is no limit.
    """

    folder: Path
    images: Path | None = None
    peers: bool = False
    repeats: int = 7
    case: str = ""
    round_s: float | None = None
    limit_s: float | None = None


@dataclass(frozen=True)
class Bench:
    """A benchmark.

    Attributes:
        name: name on the command line.
        summary: one line.
        cases: creates the cases; nothing expensive happens before a candidate is started.
    """

    name: str
    summary: str
    cases: Callable[[Settings], Iterable[Case]]

    def chosen_cases(self, settings: Settings) -> list[Case]:
        """Return the cases that the user selected, without peers unless requested.

        Raises:
            ValueError: no case matches.
        """
        cases = list(self.cases(settings))
        chosen = [case for case in cases if settings.case.lower() in case.name.lower()]
        if not chosen:
            raise ValueError(
                f"--case must be part of the name of one of {self.name}'s cases "
                f"({'; '.join(case.name for case in cases)}), got {settings.case!r}"
            )
        return [
            replace(
                case,
                candidates=tuple(each for each in case.candidates if settings.peers or not each.peer),
                round_s=settings.round_s or case.round_s,
            )
            for case in chosen
        ]
