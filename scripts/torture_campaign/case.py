"""A case of the campaign, the commands that it ran, and the rules by which their exit and their output are judged."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Protocol

from scripts.torture_campaign.commands import Finished, Running

MAX_MB = 2_600.0
"""Memory limit of any command on such small data; a training takes 400 to 700 MB."""
_MAX_MESSAGE_BYTES = 8_000
_SOUND_TIMEOUT_S = 400.0
_TRACEBACK = re.compile(
    r"Traceback \(most recent call last\)|\b[A-Z]\w*(?:Error|Exception|Warning)\b(?=[:(]| \()"
    r"|^\s*File \"[^\"]+\", line \d+",
    re.MULTILINE,
)
_OUT_OF_MEMORY = re.compile(r"not enough memory|Cannot allocate memory|RESOURCE_EXHAUSTED|std::bad_alloc")
# ESC, BEL and C1, including single bytes that are not valid UTF-8.
_ESCAPE = re.compile("[\x1b\x07\x80-\x9f\udc80-\udc9f]")


class Verdict(StrEnum):
    """The kinds of outcome, from best to worst; the last four fail the campaign."""

    HARMLESS = "harmless"
    DETECTED = "detected"
    DOCUMENTED = "documented"
    WRONG = "wrong"
    TRACEBACK = "traceback"
    HANG = "hang"
    CRASH = "crash"

    @property
    def severity(self) -> int:
        """The position in the order of severity."""
        return list(Verdict).index(self)

    @property
    def is_failure(self) -> bool:
        """Whether it fails the campaign."""
        return self.severity >= Verdict.WRONG.severity


@dataclass(frozen=True)
class Judgement:
    """A verdict on one command, with the reason in one line."""

    command: str
    verdict: Verdict
    why: str = ""


@dataclass(frozen=True)
class Case:
    """One fault to try.

    Attributes:
        kind: the name of its kind.
        name: unique within the kind; ends with a number if the fault is drawn.
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
        head, _, number = self.name.rpartition("-")
        return int(number) if head in ("random", "group", "packing", "training") else None

    def draw(self) -> random.Random:
        """Return the case's own random generator."""
        return random.Random(f"{self.seed}/{self.id}")


@dataclass
class Trial:
    """A case that is being tried.

    Attributes:
        case: the case.
        folder: a new, empty folder for it.
        fault: description of the fault, in one line.
        judgements: judgements on the commands.
        log: the commands that ran.
    """

    case: Case
    folder: Path
    fault: str = ""
    judgements: list[Judgement] = field(default_factory=list)
    log: list[Finished] = field(default_factory=list)
    _num_started: int = 0

    def start(self, command: list[str], environment: Mapping[str, str] = MappingProxyType({})) -> Running:
        """Start a command in a new working folder beside the case's files."""
        where = self.folder / f"cwd-{self._num_started}"
        self._num_started += 1
        where.mkdir()
        return Running(command, where, environment)

    def end(self, running: Running, timeout_s: float) -> Finished:
        """Wait for a command, with a limit from its start."""
        self.log.append(running.wait(timeout_s))
        return self.log[-1]

    def run(
        self, command: list[str], timeout_s: float, environment: Mapping[str, str] = MappingProxyType({})
    ) -> Finished:
        """Run a command to its end."""
        return self.end(self.start(command, environment), timeout_s)

    def run_soundly(self, command: list[str], environment: Mapping[str, str] = MappingProxyType({})) -> Finished:
        """Run a command on sound data; raise RuntimeError if it fails."""
        finished = self.run(command, _SOUND_TIMEOUT_S, environment)
        if finished.code != 0:
            raise RuntimeError(f"{' '.join(command)} failed on sound data: {finished.output}")
        return finished

    def judge(self, judgement: Judgement) -> None:
        """Record a judgement."""
        self.judgements.append(judgement)

    @property
    def has_hung(self) -> bool:
        """Whether a command hung; the others would probably hang too."""
        return any(judgement.verdict is Verdict.HANG for judgement in self.judgements)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict."""
        return max([Verdict.HARMLESS, *(judgement.verdict for judgement in self.judgements)], key=lambda v: v.severity)

    def __str__(self) -> str:
        shown = [judgement for judgement in self.judgements if judgement.verdict.is_failure]
        described = "; ".join(f"{each.command} {each.verdict.upper()}: {each.why}" for each in shown)
        return f"{self.case.id}: {self.fault}: {described}"


class Kind(Protocol):
    """A kind of faults; a case whose name has one of the `heavy` words needs much memory or time."""

    heavy: ClassVar[tuple[str, ...]]

    def prepare(self, trial: Trial) -> None:
        """Create the sound data, once, in a folder that is kept."""
        ...

    def names(self, count: int) -> list[str]:
        """Return the names of the cases, the named faults first and then drawn ones up to ``count`` in all."""
        ...

    def attempt(self, trial: Trial) -> None:
        """Apply the fault of a case, run commands and judge them."""
        ...


def judge_exit(
    finished: Finished, *, names: Iterable[str], refusals: tuple[int, ...] = (2,), max_mb: float = MAX_MB
) -> Judgement | None:
    """Judge the exit of a command; return None if it exited with 0 and its output has no fault.

    Args:
        finished: the command.
        names: the message of a refusal must contain one of them.
        refusals: exit codes that are allowed for a refusal.
        max_mb: memory limit in MB.
    """
    found = _fault_of_exit(finished, max_mb)
    if found is None and finished.code != 0:
        words = first_line(error_message(finished))
        if _OUT_OF_MEMORY.search(words):
            found = Verdict.CRASH, f"reached its memory limit: {words}"
        elif fault := _fault_of_refusal(finished, names, refusals):
            found = Verdict.WRONG, f"{fault}: {words}"
        else:
            found = Verdict.DETECTED, words
    return None if found is None else Judgement(finished.command[0], *found)


def _fault_of_exit(finished: Finished, max_mb: float) -> tuple[Verdict, str] | None:
    """Return a fault that is not allowed for any command, or None."""
    said = finished.output
    if finished.hung:
        return Verdict.HANG, f"did not end within {finished.seconds:.0f} s"
    if finished.code < 0:
        return Verdict.CRASH, f"ended by signal {-finished.code}"
    if finished.max_rss_mb > max_mb:
        return Verdict.CRASH, f"used {finished.max_rss_mb:,.0f} MB, more than its limit of {max_mb:,.0f} MB"
    if found := _TRACEBACK.search(said):
        return Verdict.TRACEBACK, first_line(said[found.start() :])
    if found := _ESCAPE.search(said):
        around = said[max(0, found.start() - 30) : found.end() + 10]
        return Verdict.WRONG, f"a control character in its output: {around!a}"
    return None


def _fault_of_refusal(finished: Finished, names: Iterable[str], refusals: tuple[int, ...]) -> str:
    """Return what is wrong with the message or the exit code of a refusal; empty if nothing is."""
    if finished.code not in refusals:
        return f"exit code {finished.code}, expected one of {refusals}"
    if not finished.output.strip():
        return f"exit code {finished.code} without a message"
    if len(finished.err) > _MAX_MESSAGE_BYTES:
        return f"a message of {len(finished.err):,} bytes"
    if not any(name in error_message(finished) for name in names):
        return "its message does not name a damaged file"
    return ""


def error_message(finished: Finished) -> str:
    """Return the final error message of a command, without earlier output."""
    said = finished.err.decode(errors="replace")
    starts = list(re.finditer(rf"^(?:{re.escape(finished.command[0])}|Error): ", said, re.MULTILINE))
    return said[starts[-1].start() :] if starts else finished.out.decode(errors="replace") + said


def first_line(text: str) -> str:
    """Return the first non-empty line, at most 160 characters, without control characters."""
    line = next((line for line in map(str.strip, text.splitlines()) if line), "")
    printable = "".join(character if character.isprintable() else "�" for character in line)
    return printable if len(printable) <= 160 else f"{printable[:159]}…"
