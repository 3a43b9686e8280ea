"""The sections about the course of the training: losses, evaluations, learning rate and speed."""

from collections.abc import Callable, Sequence

import numpy as np

from loopfeed.engine.records.loss_log import Floats
from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.charts import Chart, Line, draw
from loopfeed.engine.report_page.curves import Curves, smooth
from loopfeed.engine.report_page.layout import absences, section
from loopfeed.engine.report_page.markup import Html, paragraph, table, tag
from loopfeed.engine.report_page.number_text import number
from loopfeed.engine.report_page.subject import Subject
from loopfeed.engine.stream.sinks import EvaluationRecord
from loopfeed.preprocess.quantities import quantity

_MOST_BANDS = 3
_MOST_METRICS = 12


def loss_section(subjects: Sequence[Subject]) -> Html:
    """Return the loss of the training, as it was and smoothed, and the metrics of the training."""
    shown = _with_curves(subjects)
    is_alone = len(subjects) == 1
    lines = []
    for subject, curves in shown:
        band = (curves.lowest, curves.highest) if curves.bin_steps > 1 and len(shown) <= _MOST_BANDS else None
        lines += _smoothed_lines(subject, curves, curves.loss, curves.smoothed, is_alone, band)
    content: list[Html | None] = []
    if shown:
        chart = Chart("Loss of the training", lines, from_zero=False, note=_loss_note([curves for _, curves in shown]))
        content += [draw(chart), *(_fault_note(subject, curves) for subject, curves in shown)]
    names = dict.fromkeys(name for _, curves in shown for name in curves.metrics)
    for name in names:
        own = [
            _own_line(subject, curves, curves.metrics[name], "" if is_alone else subject.letter)
            for subject, curves in shown
            if name in curves.metrics
        ]
        content.append(draw(Chart(f"{name} in training", own, from_zero=False)))
    return section("loss", "Loss", *content, absences(subjects, lambda each: each.facts.curves))


def _smoothed_lines(
    subject: Subject,
    curves: Curves,
    values: Floats,
    smoothed: Floats,
    is_alone: bool,
    band: tuple[Floats, Floats] | None = None,
) -> list[Line]:
    """Return the smoothed line of a column of the log, and the column itself behind it."""
    raw = "each step" if curves.bin_steps == 1 else f"mean of {curves.bin_steps:,} steps"
    before, label = ("", "") if is_alone else (f"{subject.letter}, ", subject.letter)
    return [
        Line(f"{before}smoothed", label, curves.step, smoothed, subject.style),
        Line(f"{before}{raw}", "", curves.step, values, subject.style, band=band, is_faint=True),
    ]


def _loss_note(curves: Sequence[Curves]) -> str:
    parts = []
    widest = max(each.bin_steps for each in curves)
    if widest > 1:
        parts.append(
            f"The steps are divided into bins, of up to {widest:,} steps, so that the page stays small; a band shows "
            "the lowest and the highest loss of a bin."
        )
    steps = " and ".join(dict.fromkeys(f"{each.smoothing_steps:,.0f}" for each in curves))
    return " ".join([*parts, f"The smoothed loss is an exponential moving average over about {steps} steps."])


def _fault_note(subject: Subject, curves: Curves) -> Html | None:
    parts = []
    if curves.num_nonfinite:
        verb = "is" if curves.num_nonfinite == 1 else "are"
        losses = f"{quantity(curves.num_nonfinite, 'loss')} of {subject.facts.name}"
        parts.append(f"{losses} {verb} NaN or infinite, first at step {curves.first_nonfinite:,}.")
    if curves.num_unreadable:
        parts.append(f"{quantity(curves.num_unreadable, 'line')} of its loss.jsonl cannot be read.")
    return paragraph(" ".join(parts), class_="warning") if parts else None


def _with_curves(subjects: Sequence[Subject]) -> list[tuple[Subject, Curves]]:
    return [(each, each.facts.curves) for each in subjects if not isinstance(each.facts.curves, Absent)]


def _own_line(subject: Subject, curves: Curves, values: Floats, letter: str) -> Line:
    return Line(letter or "value", letter, curves.step, values, subject.style)


def evaluation_section(subjects: Sequence[Subject]) -> Html:
    """Return the evaluations during the runs: accuracies, loss, and the user's metrics."""
    logged = [(each, each.facts.evaluations) for each in subjects if not isinstance(each.facts.evaluations, Absent)]
    shown = [(subject, evaluations.records) for subject, evaluations in logged]
    is_alone = len(subjects) == 1
    charts: list[Chart] = []

    def lines(value: Callable[[EvaluationRecord], float], name: str = "", style: int | None = None) -> list[Line]:
        found = []
        for subject, records in shown:
            steps = np.array([each.step for each in records], np.float64)
            values = np.array([value(each) for each in records], np.float64)
            if np.isfinite(values).any():
                label = name if is_alone else subject.letter
                shown_style = subject.style if style is None else style
                found.append(Line(label or "value", label, steps, values, shown_style, is_marked=True))
        return found

    tops = lines(lambda each: 100 * each.top1, "top-1", 0 if is_alone else None)
    fives = lines(lambda each: 100 * each.top5, "top-5", 1 if is_alone else None)
    if is_alone and tops:
        charts.append(Chart("Accuracy", [*tops, *fives], "%", from_zero=False, most=100.0))
    else:
        named = (("Top-1 accuracy", tops), ("Top-5 accuracy", fives))
        charts += [Chart(title, each, "%", from_zero=False, most=100.0) for title, each in named if each]
    if losses := lines(lambda each: each.loss):
        charts.append(Chart("Loss of the evaluations", losses, from_zero=False))
    names = dict.fromkeys(name for _, records in shown for each in records for name in each.metrics)
    for name in list(names)[:_MOST_METRICS]:
        if own := lines(lambda each, name=name: _metric(each, name)):  # type: ignore[misc]
            charts.append(Chart(name, own, from_zero=False))
    content = [tag("div", map(draw, charts), class_="row")] if charts else []
    if (every := max((evaluations.every for _, evaluations in logged), default=1)) > 1:
        content.append(paragraph(f"One in {every} evaluations is shown, beside the best and the last.", class_="note"))
    content += [_evaluation_table("" if is_alone else f" of {subject.letter}", records) for subject, records in shown]
    return section("evaluations", "Evaluations", *content, absences(subjects, lambda each: each.facts.evaluations))


def _metric(record: EvaluationRecord, name: str) -> float:
    value = record.metrics.get(name)
    return float(value) if isinstance(value, int | float) else float("nan")


def _evaluation_table(of_run: str, records: Sequence[EvaluationRecord]) -> Html:
    """Return the newest evaluations of a run as a table, folded."""
    newest = records[-20:]
    own = list(dict.fromkeys(name for each in newest for name in each.metrics))[:_MOST_METRICS]
    scalar = [name for name in own if any(np.isfinite(_metric(each, name)) for each in newest)]
    has_fives = any(np.isfinite(each.top5) for each in newest)
    rows = [
        (
            f"{each.step:,}",
            number(100 * each.top1),
            *([number(100 * each.top5)] if has_fives else []),
            number(each.loss),
            *(number(_metric(each, name)) for name in scalar),
            f"{each.num_images:,}",
        )
        for each in newest
    ]
    left_out = [name for name in own if name not in scalar]
    columns = ("step", "top-1 %", *(["top-5 %"] if has_fives else []), "loss", *scalar, "images")
    which = "Evaluations" if len(newest) == len(records) else f"The last {len(newest)} of {len(records):,} evaluations"
    return tag(
        "details",
        tag("summary", f"{which}{of_run} as a table"),
        table(columns, rows, caption=f"{which}{of_run}", numbers=range(len(columns))),
        paragraph(f"Not shown, because they are arrays: {', '.join(left_out)}.", class_="note") if left_out else None,
    )


def rate_section(subjects: Sequence[Subject]) -> Html:
    """Return the learning rate."""
    content = _column_chart(subjects, "Learning rate", "", lambda curves: curves.learning_rate)
    return section("rate", "Learning rate", content, absences(subjects, lambda each: each.facts.curves))


def speed_section(subjects: Sequence[Subject]) -> Html:
    """Return images per second, as they were and smoothed, and the wait for batches."""
    lines: list[Line] = []
    for subject, curves in _with_curves(subjects):
        values = curves.images_per_s
        if np.isfinite(values).any():
            smoothed = smooth(curves.step, values, curves.smoothing_steps)
            lines += _smoothed_lines(subject, curves, values, smoothed, len(subjects) == 1)
    throughput = draw(Chart("Throughput", lines, "images/s")) if lines else None
    wait = _column_chart(subjects, "Wait for the batch", "ms a step", lambda curves: curves.wait_ms)
    content = tag("div", throughput, wait, class_="row")
    return section("speed", "Throughput", content, absences(subjects, lambda each: each.facts.curves))


def _column_chart(
    subjects: Sequence[Subject], title: str, unit: str, column: Callable[[Curves], Floats]
) -> Html | None:
    """Return a chart of a column of the log, None if no run has it."""
    lines = [
        _own_line(subject, curves, column(curves), "" if len(subjects) == 1 else subject.letter)
        for subject, curves in _with_curves(subjects)
        if np.isfinite(column(curves)).any()
    ]
    return draw(Chart(title, lines, unit)) if lines else None
