"""The verdict on how a command handled a fault, and the rules that derive it from its exit status and output."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from scripts.torture_campaign.commands import Finished

MAX_MESSAGE_BYTES = 8_000
MAX_MB = 2_600.0
"""Memory limit of any command on such small data; a training takes 400 to 700 MB."""
_TRACEBACK = re.compile(
    r"Traceback \(most recent call last\)|\b[A-Z]\w*(?:Error|Exception|Warning)\b(?=[:(]| \()"
    r"|^\s*File \"[^\"]+\", line \d+",
    re.MULTILINE,
)
_OUT_OF_MEMORY = re.compile(r"not enough memory|Cannot allocate memory|RESOURCE_EXHAUSTED|std::bad_alloc")
# ESC, BEL and C1, including single bytes that are not valid UTF-8.
_ESCAPE = re.compile("[\x1b\x07\x80-\x9f\udc80-\udc9f]")


class Verdict(StrEnum):
    """The kinds of outcome, from best to worst."""

    HARMLESS = "harmless"
    DETECTED = "detected"
    DOCUMENTED = "documented"
    WRONG = "wrong"
    TRACEBACK = "traceback"
    HANG = "hang"
    CRASH = "crash"

    @property
    def is_failure(self) -> bool:
        """Whether it fails the campaign."""
        return self in FAILURES

    @property
    def severity(self) -> int:
        """The position in the order of severity."""
        return list(Verdict).index(self)


FAILURES = (Verdict.WRONG, Verdict.TRACEBACK, Verdict.HANG, Verdict.CRASH)


@dataclass(frozen=True)
class Judgement:
    """A verdict on one command.

    Attributes:
        command: name of the command.
        verdict: the verdict.
        why: the reason, in one line.
    """

    command: str
    verdict: Verdict
    why: str = ""


def worst_of(judgements: Iterable[Judgement]) -> Judgement:
    """Return the worst of one or more judgements."""
    return max(judgements, key=lambda each: each.verdict.severity)


def judge_exit(
    finished: Finished,
    *,
    names: Iterable[str],
    refusals: tuple[int, ...] = (2,),
    max_mb: float = MAX_MB,
) -> Judgement | None:
    """Judge the exit of a command; return None if it exited with 0 and its output has no fault.

    Args:
        finished: the command.
        names: the message of a refusal must contain one of them.
        refusals: exit codes that are allowed for a refusal.
        max_mb: memory limit in MB.
    """
    if found := _fault_of_exit(finished, max_mb):
        return Judgement(finished.command[0], *found)
    if finished.code == 0:
        return None
    words = first_line(error_message(finished))
    if _OUT_OF_MEMORY.search(words):
        return Judgement(finished.command[0], Verdict.CRASH, f"reached its memory limit: {words}")
    if fault := _fault_of_refusal(finished, tuple(names), refusals):
        return Judgement(finished.command[0], Verdict.WRONG, f"{fault}: {words}")
    return Judgement(finished.command[0], Verdict.DETECTED, words)


def _fault_of_exit(finished: Finished, max_mb: float) -> tuple[Verdict, str] | None:
    """Return a fault that is not allowed for any command, or None."""
    if finished.hung:
        return Verdict.HANG, f"did not end within {finished.seconds:.0f} s"
    if finished.code < 0:
        return Verdict.CRASH, f"ended by signal {-finished.code}"
    if finished.max_rss_mb > max_mb:
        return Verdict.CRASH, f"used {finished.max_rss_mb:,.0f} MB, more than its limit of {max_mb:,.0f} MB"
    said = finished.output
    if found := _TRACEBACK.search(said):
        return Verdict.TRACEBACK, first_line(said[found.start() :])
    if found := _ESCAPE.search(said):
        around = said[max(0, found.start() - 30) : found.end() + 10]
        return Verdict.WRONG, f"a control character in its output: {around!a}"
    return None


def _fault_of_refusal(finished: Finished, names: tuple[str, ...], refusals: tuple[int, ...]) -> str:
    """Return what is wrong with the message or the exit code of a refusal; empty if nothing is."""
    if finished.code not in refusals:
        return f"exit code {finished.code}, expected one of {refusals}"
    if not finished.output.strip():
        return f"exit code {finished.code} without a message"
    if len(finished.err) > MAX_MESSAGE_BYTES:
        return f"a message of {len(finished.err):,} bytes"
    if not any(each in error_message(finished) for each in names):
        return "its message does not name a damaged file"
    return ""


def error_message(finished: Finished) -> str:
    """Return the final error message of a command, without earlier output."""
    said = finished.err.decode(errors="replace")
    starts = [
        found.start() for found in re.finditer(rf"^(?:{re.escape(finished.command[0])}|Error): ", said, re.MULTILINE)
    ]
    return said[starts[-1] :] if starts else finished.out.decode(errors="replace") + said


def first_line(text: str) -> str:
    """Return the first non-empty line, at most 160 characters, without control characters."""
    lines = (line.strip() for line in text.splitlines())
    line = next((line for line in lines if line), "")
    printable = "".join(character if character.isprintable() else "�" for character in line)
    return printable if len(printable) <= 160 else f"{printable[:159]}…"
