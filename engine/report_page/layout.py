"""What sections have in common: headings, blocks side by side for several runs, and why something is absent."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.markup import Html, Node, join, paragraph, tag
from loopfeed.engine.report_page.subject import Subject


def section(name: str, title: str, *content: Node | Iterable[Node]) -> Html:
    """Return a section of the page."""
    return tag("section", tag("h2", title), *content, id=name)


def each_run(
    subjects: Sequence[Subject],
    found: Callable[[Subject], Any],
    of_run: Callable[[Subject], Html],
    *,
    is_wide: bool = False,
) -> Html:
    """Return a block for each run, side by side where the page is wide, or why there is none.

    Args:
        subjects: the runs.
        found: what the block is about; `Absent` if there is none.
        of_run: the content of the block.
        is_wide: whether a block needs the whole width of the page.
    """
    if len(subjects) == 1:
        absent = absences(subjects, found)
        return join(absent) if absent is not None else of_run(subjects[0])
    return tag(
        "div",
        (
            tag("div", tag("h3", run_name(each)), of_run(each) if (why := absences([each], found)) is None else why)
            for each in subjects
        ),
        class_=None if is_wide else "row",
    )


def absences(subjects: Sequence[Subject], found: Callable[[Subject], Any]) -> Html | None:
    """Return a sentence for each run that lacks something, saying why; None if none does."""
    reasons = [(each, value.reason) for each in subjects if isinstance(value := found(each), Absent)]
    if not reasons:
        return None
    named = len(subjects) > 1
    return join(
        *(
            paragraph(f"{each.letter}: " if named else None, f"Nothing to show: {reason.rstrip('.')}.", class_="absent")
            for each, reason in reasons
        )
    )


def run_name(subject: Subject) -> str:
    """Return the letter and the name of a run."""
    return f"{subject.letter} · {subject.facts.name}"


def bar(percent: float) -> Html:
    """Return a bar, 0 … 100 % of the width of its cell; empty for NaN."""
    width = 0.0 if math.isnan(percent) else min(max(percent, 0.0), 100.0)
    return tag(
        "svg",
        tag("rect", class_="track", width="100%", height="100%"),
        tag("rect", class_="fill", width=f"{width:.2f}%", height="100%"),
        class_="bar",
        aria_hidden="true",
    )
