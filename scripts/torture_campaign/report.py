"""The tables of the campaign."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scripts.torture_campaign.case import Outcome
from scripts.torture_campaign.documented import EXEMPTIONS
from scripts.torture_campaign.verdict import FAILURES, Verdict

_COLUMNS = (
    Verdict.DETECTED,
    Verdict.HARMLESS,
    Verdict.DOCUMENTED,
    Verdict.WRONG,
    Verdict.TRACEBACK,
    Verdict.HANG,
    Verdict.CRASH,
)


def table(outcomes: Iterable[Outcome]) -> str:
    """Return a table with a row per kind: the number of faults, and of outcomes by the worst verdict of each case."""
    counts: dict[str, Counter[Verdict]] = {}
    for outcome in outcomes:
        counts.setdefault(outcome.case.kind, Counter())[outcome.worst.verdict] += 1
    total = sum(counts.values(), Counter[Verdict]())
    rows = [("kind", "faults", *map(str, _COLUMNS))]
    for name, count in [*counts.items(), ("all", total)]:
        rows.append((name, str(count.total()), *(str(count[column]) for column in _COLUMNS)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def is_clean(outcomes: Iterable[Outcome]) -> bool:
    """Return whether no outcome fails the campaign."""
    return not any(outcome.worst.verdict in FAILURES for outcome in outcomes)


def documented() -> str:
    """Return the documented exemptions with their reasons."""
    return "\n".join(f"documented: {each.name}: {each.reason}" for each in EXEMPTIONS)
