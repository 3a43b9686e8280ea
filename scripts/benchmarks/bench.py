"""What a benchmark consists of: cases, in each of which several candidates do the same work."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

CANDIDATES = Path(__file__).parent / "candidates"


class Unit(NamedTuple):
    """How a case's speeds are shown.

    Attributes:
        text: e.g. "images/s" or "µs a pull".
        scale: multiplies the amount a second, or the seconds an amount.
        is_time: whether seconds an amount are shown: less is better.
    """

    text: str
    scale: float = 1.0
    is_time: bool = False

    def shown(self, speed: float) -> float:
        """Gives a speed, in amounts a second, in this unit."""
        return self.scale / speed if self.is_time else self.scale * speed


IMAGES_PER_S = Unit("images/s")
GB_PER_S = Unit("GB/s", 1e-9)


@dataclass(frozen=True)
class Candidate:
    """One way to do a case's work: a script that speaks `candidates.protocol`.

    Attributes:
        name: for the table.
        script: file name in `candidates/`.
        arguments: of the script.
        peer: the name of its environment in `peers.PEERS`; empty where it runs on this Python.
        environment: variables of its process, besides the user's own.
        target: how many times as fast as this one the base should be at least; None where nothing is aimed at.
        prepare_timeout_s: seconds that building, compiling and converting may take.
        round_timeout_s: seconds that one answer may take.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    peer: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    target: float | None = None
    prepare_timeout_s: float = 900.0
    round_timeout_s: float = 300.0

    def command(self, python: str = sys.executable) -> list[str]:
        """Gives the command that starts it on this interpreter."""
        return [python, str(CANDIDATES / self.script), *self.arguments]


@dataclass(frozen=True)
class Case:
    """Candidates that are compared, round by round.

    Attributes:
        name: what is done, with its sizes.
        unit: of the speeds.
        base: the candidate whose speed is divided by the others'.
        candidates: in the order of the table; peers among them are left out unless asked for.
        round_s: seconds that a round of one candidate is to take.
        prepare: makes the data that all candidates need, once; told how to say what it does. Raises ValueError, OSError
            or RuntimeError where it cannot.
        agree: names of facts in which a candidate must agree with the base to 1e-4, where both tell them.
    """

    name: str
    unit: Unit
    base: str
    candidates: tuple[Candidate, ...]
    round_s: float = 1.5
    prepare: Callable[[Callable[[str], None]], object] = lambda _: None
    agree: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [candidate.name for candidate in self.candidates]
        if len(set(names)) < len(names) or self.base not in names:
            raise ValueError(f"candidates must have names of their own, the base among them; got {names}, {self.base}")


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Attributes:
        folder: where environments, data and logs are kept.
        images: a folder of class folders of JPEG files; None draws some.
        peers: whether to measure other projects too.
        repeats: rounds.
        case: a part of the names of the cases to measure; empty is all.
        round_s: seconds that each candidate is to take in a round; None is the case's own.
    """

    folder: Path
    images: Path | None = None
    peers: bool = False
    repeats: int = 7
    case: str = ""
    round_s: float | None = None


@dataclass(frozen=True)
class Bench:
    """A benchmark.

    Attributes:
        name: on the command line.
        summary: one line.
        cases: makes them; nothing heavy happens before a candidate is started.
    """

    name: str
    summary: str
    cases: Callable[[Settings], Sequence[Case]]

    def chosen_cases(self, settings: Settings) -> list[Case]:
        """Gives the cases that the user chose, without peers unless they are asked for.

        Raises:
            ValueError: none of the cases has that name.
        """
        cases = list(self.cases(settings))
        chosen = [case for case in cases if settings.case.lower() in case.name.lower()]
        if not chosen:
            raise ValueError(
                f"--case must be a part of one of {self.name}'s cases ({'; '.join(case.name for case in cases)}), "
                f"got {settings.case!r}"
            )
        return [_as_asked(case, settings) for case in chosen]


def _as_asked(case: Case, settings: Settings) -> Case:
    kept = tuple(candidate for candidate in case.candidates if settings.peers or not candidate.peer)
    return replace(case, candidates=kept, round_s=settings.round_s or case.round_s)
