"""A case of the campaign: one fault, named or drawn from the seed, and how the commands handled it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts.torture_campaign.commands import Commands, Finished
from scripts.torture_campaign.verdict import Judgement, Verdict, worst_of

KINDS = ("packs", "runs", "images", "archives", "kills", "calls")


@dataclass(frozen=True)
class Case:
    """One fault to try.

    Attributes:
        kind: one of `KINDS`.
        name: unique within the kind; ``random-<number>`` if the fault is drawn.
        seed: the seed of the campaign.
        is_heavy: whether it needs much memory or time; two such cases never run at once.
    """

    kind: str
    name: str
    seed: int
    is_heavy: bool = False

    @property
    def id(self) -> str:
        """The id, as given to ``--case``."""
        return f"{self.kind}/{self.name}"

    @property
    def number(self) -> int | None:
        """The number of a drawn fault; None for a named one."""
        head, _, number = self.name.rpartition("random-")
        return int(number) if not head and number.isdigit() else None

    @property
    def is_drawn(self) -> bool:
        """Whether the fault is drawn, so that the number of such cases can vary."""
        return self.name.rpartition("-")[0] in ("random", "group", "packing", "training")

    def draw(self) -> random.Random:
        """Return the case's own random generator."""
        return random.Random(f"{self.seed}/{self.id}")


@dataclass
class Trial:
    """A case that is being tried.

    Attributes:
        case: the case.
        folder: a new, empty folder for it; removed afterwards.
        commands: runs the commands.
        fault: description of the fault, in one line.
        judgements: judgements on the commands.
        log: the commands that ran.
        parts: the outcome of each fault, if the case has several.
    """

    case: Case
    folder: Path
    commands: Commands
    fault: str = ""
    judgements: list[Judgement] = field(default_factory=list)
    log: list[Finished] = field(default_factory=list)
    parts: list[Outcome] = field(default_factory=list)

    def run(self, command: list[str], *, timeout_s: float, environment: Mapping[str, str] | None = None) -> Finished:
        """Run a command in a new working folder beside the case's files, with more variables in its environment."""
        where = self.folder / f"cwd-{len(self.log)}"
        where.mkdir()
        finished = self.commands.run(command, where, timeout_s=timeout_s, environment=environment or {})
        self.log.append(finished)
        return finished

    def judge(self, judgement: Judgement) -> None:
        """Record a judgement."""
        self.judgements.append(judgement)

    @property
    def has_hung(self) -> bool:
        """Whether a command hung; the others would probably hang too."""
        return any(each.verdict is Verdict.HANG for each in self.judgements)

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of the case, or of each of its parts."""
        if self.parts:
            return self.parts
        worst = worst_of(self.judgements) if self.judgements else Judgement("", Verdict.HARMLESS)
        return [Outcome(self.case, self.fault, worst, tuple(self.judgements))]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: a description of its fault, the worst judgement, and all judgements."""

    case: Case
    fault: str
    worst: Judgement
    judgements: tuple[Judgement, ...]

    def __str__(self) -> str:
        shown = [each for each in self.judgements if each.verdict.is_failure] or [self.worst]
        described = "; ".join(f"{each.command} {each.verdict.upper()}: {each.why}" for each in shown)
        return f"{self.case.id}: {self.fault}: {described}"
