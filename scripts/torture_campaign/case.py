"""A case of the campaign: one fault, named, drawn from the seed, and what the commands made of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from scripts.torture_campaign.commands import Commands, Finished
from scripts.torture_campaign.verdict import Judgement, Verdict, worst_of

KINDS = ("packs", "runs", "images", "archives", "kills")


@dataclass(frozen=True)
class Case:
    """One fault to try.

    Attributes:
        kind: of `KINDS`.
        name: unique within the kind; ``random-<number>`` where the fault is drawn.
        seed: of the campaign.
        is_heavy: whether it needs much memory or time: two of these never run at once.
    """

    kind: str
    name: str
    seed: int
    is_heavy: bool = False

    @property
    def id(self) -> str:
        """What ``--case`` takes."""
        return f"{self.kind}/{self.name}"

    @property
    def number(self) -> int | None:
        """The number of a drawn fault; None for a named one."""
        head, _, number = self.name.rpartition("random-")
        return int(number) if not head and number.isdigit() else None

    @property
    def is_drawn(self) -> bool:
        """Whether the fault is drawn: there may be more or fewer of them."""
        return self.name.rpartition("-")[0] in ("random", "group", "packing", "training")

    def draw(self) -> random.Random:
        """Return the case's own source of chance."""
        return random.Random(f"{self.seed}/{self.id}")


@dataclass
class Trial:
    """A case under way.

    Attributes:
        case: which.
        folder: its own, new and empty; removed afterwards.
        commands: to run.
        fault: what was done, in one line.
        judgements: on each command.
        log: the commands that ran.
        parts: what came of each fault, where a case is several.
    """

    case: Case
    folder: Path
    commands: Commands
    fault: str = ""
    judgements: list[Judgement] = field(default_factory=list)
    log: list[Finished] = field(default_factory=list)
    parts: list[Outcome] = field(default_factory=list)

    def run(self, command: list[str], *, timeout_s: float) -> Finished:
        """Run a command in a folder beside the case's files."""
        where = self.folder / f"cwd-{len(self.log)}"
        where.mkdir()
        finished = self.commands.run(command, where, timeout_s=timeout_s)
        self.log.append(finished)
        return finished

    def judge(self, judgement: Judgement) -> None:
        """Note a judgement."""
        self.judgements.append(judgement)

    @property
    def has_hung(self) -> bool:
        """Whether a command came to no end: the others would only take as long."""
        return any(each.verdict is Verdict.HANG for each in self.judgements)

    def outcomes(self) -> list[Outcome]:
        """Return what came of the case, or of each of its parts."""
        if self.parts:
            return self.parts
        worst = worst_of(self.judgements) if self.judgements else Judgement("", Verdict.HARMLESS)
        return [Outcome(self.case, self.fault, worst, tuple(self.judgements))]


@dataclass(frozen=True)
class Outcome:
    """What came of a case: its fault in words, the worst judgement, and all of them."""

    case: Case
    fault: str
    worst: Judgement
    judgements: tuple[Judgement, ...]

    def __str__(self) -> str:
        reds = [each for each in self.judgements if each.verdict.is_red] or [self.worst]
        told = "; ".join(f"{each.command} {each.verdict.upper()}: {each.why}" for each in reds)
        return f"{self.case.id}: {self.fault}: {told}"
