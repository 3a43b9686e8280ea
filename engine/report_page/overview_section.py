"""The head of the page: the state of each run, and their results."""

import math
from collections.abc import Sequence

import numpy as np

from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.curves import Curves
from loopfeed.engine.report_page.facts import Evaluations
from loopfeed.engine.report_page.layout import run_name, section
from loopfeed.engine.report_page.markup import Html, join, paragraph, table, tag
from loopfeed.engine.report_page.number_text import duration, number, percent
from loopfeed.engine.report_page.subject import Subject
from loopfeed.engine.runtime.record import RuntimeReport
from loopfeed.engine.stream.sinks import EvaluationRecord


def overview_section(subjects: Sequence[Subject]) -> Html:
    """Return the results of the runs: as tiles for one run, as a table for several."""
    results = [_results(each) for each in subjects]
    if len(subjects) == 1:
        tiles = (tag("div", tag("dt", name), tag("dd", value)) for name, value in results[0].items())
        content: Html = tag("dl", tiles, class_="tiles")
    else:
        columns = ("run", *results[0])
        rows = [(run_name(each), *found.values()) for each, found in zip(subjects, results, strict=True)]
        content = table(columns, rows, caption="The runs", numbers=range(3, len(columns)))
    is_alone = len(subjects) == 1
    return section("results", "Results", content, (_state(each, is_alone) for each in subjects))


def _state(subject: Subject, is_alone: bool) -> Html:
    """Return sentences about how a run ended, and what bound it."""
    facts = subject.facts
    is_bad = facts.summary.state in ("failed", "killed", "damaged", "foreign")
    words = facts.state
    text = f"{words[:1].upper()}{words[1:]}." if is_alone else f"{words}."
    lines = [
        paragraph(None if is_alone else tag("b", f"{run_name(subject)}: "), text, class_="warning" if is_bad else None)
    ]
    if not isinstance(facts.runtime, Absent) and (verdict := facts.runtime.verdict) is not None:
        name = "Verdict: " if is_alone else f"Verdict of {subject.letter}: "
        lines.append(paragraph(tag("b", name), f"{verdict.line}."))
    return join(lines)


def _results(subject: Subject) -> dict[str, str]:
    facts, curves = subject.facts, subject.facts.curves
    found = {"state": facts.summary.state, "model": facts.known.model or "–"}
    if isinstance(curves, Absent):
        found |= dict.fromkeys(("step", "loss, smoothed", "images/s, median", "wall time"), "–")
    else:
        planned = "" if facts.known.steps is None else f" / {facts.known.steps:,}"
        smoothed = curves.smoothed[np.isfinite(curves.smoothed)]
        speeds = curves.images_per_s[np.isfinite(curves.images_per_s)]
        found |= {
            "step": f"{curves.step[-1]:,.0f}{planned}",
            "loss, smoothed": number(float(smoothed[-1])) if len(smoothed) else "NaN",
            "images/s, median": number(float(np.median(speeds))) if len(speeds) else "–",
            "wall time": duration(_wall_time(facts.runtime, curves)),
        }
    best, last = _best(facts.evaluations)
    found |= {
        "best top-1": "–" if best is None or math.isnan(best.top1) else f"{percent(best.top1)} (step {best.step:,})",
        "last evaluation loss": "–" if last is None else number(last.loss),
    }
    return found


def _wall_time(runtime: RuntimeReport | Absent, curves: Curves) -> float:
    """Return the seconds of all launches or, if they are not recorded, those from the first loss to the last."""
    return curves.ended - curves.started if isinstance(runtime, Absent) else runtime.goodput.total


def _best(evaluations: Evaluations | Absent) -> tuple[EvaluationRecord | None, EvaluationRecord | None]:
    """Return the evaluation with the best top-1 accuracy, and the last one."""
    if isinstance(evaluations, Absent):
        return None, None
    ranked = [each for each in evaluations.records if not math.isnan(each.top1)]
    return max(ranked, key=lambda each: each.top1, default=None), evaluations.records[-1]
