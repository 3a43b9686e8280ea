"""The charts about the course of the training: losses, evaluations, learning rate and speed."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from loopfeed.engine.charts.charts import Chart, Line
from loopfeed.engine.charts.loss_charts import smooth
from loopfeed.engine.records.loss_log import Floats
from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.curves import Curves
from loopfeed.engine.report_page.run_on_page import RunOnPage
from loopfeed.engine.stream.sinks import EvaluationRecord

_MOST_BANDS = 3
MOST_METRICS = 12
"""The largest number of a user's metrics that are shown of the evaluations."""


class TrainingCharts:
    """The charts of the page about some runs; a chart without lines is left out."""

    def __init__(self, runs: Sequence[RunOnPage]) -> None:
        self._is_alone = len(runs) == 1
        self._curves = [(run, run.curves) for run in runs if not isinstance(run.curves, Absent)]
        self._evaluations = {run: run.evaluations for run in runs if not isinstance(run.evaluations, Absent)}

    @property
    def loss(self) -> list[Chart]:
        """The loss of the training, as it was and smoothed, and the metrics of the training."""
        lines = []
        for run, curves in self._curves:
            band = (
                (curves.lowest, curves.highest) if curves.bin_steps > 1 and len(self._curves) <= _MOST_BANDS else None
            )
            lines += self._smoothed_lines(run, curves, curves.loss, curves.smoothed, band)
        note = _loss_note([curves for _, curves in self._curves]) if lines else ""
        names = dict.fromkeys(name for _, curves in self._curves for name in curves.metrics)
        charts = _drawn("Loss of the training", lines, from_zero=False, note=note)
        for name in names:
            own = [
                self._line(run, curves, curves.metrics[name]) for run, curves in self._curves if name in curves.metrics
            ]
            charts += _drawn(f"{name} in training", own, from_zero=False)
        return charts

    @property
    def evaluations(self) -> list[Chart]:
        """The accuracies, the loss, and the user's metrics of the evaluations."""
        tops = self._evaluated(lambda record: 100 * record.top1, "top-1", 0)
        fives = self._evaluated(lambda record: 100 * record.top5, "top-5", 1)
        named = [("Top-1 accuracy", tops), ("Top-5 accuracy", fives)]
        if self._is_alone and tops:
            named = [("Accuracy", [*tops, *fives])]
        charts = [chart for title, each in named for chart in _drawn(title, each, "%", from_zero=False, most=100.0)]
        names = dict.fromkeys(
            name for found in self._evaluations.values() for each in found.records for name in each.metrics
        )
        own = [(name, self._evaluated(partial(metric_of, name=name))) for name in [*names][:MOST_METRICS]]
        for title, lines in [("Loss of the evaluations", self._evaluated(lambda record: record.loss)), *own]:
            charts += _drawn(title, lines, from_zero=False)
        return charts

    @property
    def thinned(self) -> str:
        """What is left out of very many evaluations, "" for nothing."""
        every = max((each.every for each in self._evaluations.values()), default=1)
        return "" if every == 1 else f"One in {every} evaluations is shown, beside the best and the last."

    @property
    def rate(self) -> list[Chart]:
        """The learning rate."""
        return _drawn("Learning rate", self._columns(lambda curves: curves.learning_rate))

    @property
    def speed(self) -> list[Chart]:
        """Images per second, as they were and smoothed, and the wait for batches."""
        lines = []
        for run, curves in self._curves:
            if np.isfinite(values := curves.images_per_s).any():
                smoothed = smooth(curves.step, values, curves.smoothing_steps)
                lines += self._smoothed_lines(run, curves, values, smoothed)
        waits = self._columns(lambda curves: curves.wait_ms)
        return [*_drawn("Throughput", lines, "images/s"), *_drawn("Wait for the batch", waits, "ms a step")]

    def _smoothed_lines(
        self,
        run: RunOnPage,
        curves: Curves,
        values: Floats,
        smoothed: Floats,
        band: tuple[Floats, Floats] | None = None,
    ) -> list[Line]:
        """Return the smoothed line of a column of the log, and the column itself behind it."""
        raw = "each step" if curves.bin_steps == 1 else f"mean of {curves.bin_steps:,} steps"
        before, label = ("", "") if self._is_alone else (f"{run.letter}, ", run.letter)
        return [
            Line(f"{before}smoothed", label, curves.step, smoothed, run.index),
            Line(f"{before}{raw}", "", curves.step, values, run.index, band=band, is_faint=True),
        ]

    def _columns(self, column: Callable[[Curves], Floats]) -> list[Line]:
        """Return the lines of a column of the log, of the runs that have it."""
        found = [(run, curves, column(curves)) for run, curves in self._curves]
        return [self._line(run, curves, values) for run, curves, values in found if np.isfinite(values).any()]

    def _line(self, run: RunOnPage, curves: Curves, values: Floats) -> Line:
        label = "" if self._is_alone else run.letter
        return Line(label or "value", label, curves.step, values, run.index)

    def _evaluated(self, value: Callable[[EvaluationRecord], float], name: str = "", style: int = 0) -> list[Line]:
        """Return the lines of a number of the evaluations; `name` and `style` are those of a run that is alone."""
        found = []
        for run, evaluations in self._evaluations.items():
            steps = np.array([record.step for record in evaluations.records], np.float64)
            values = np.array([value(record) for record in evaluations.records], np.float64)
            if np.isfinite(values).any():
                label, index = (name, style) if self._is_alone else (run.letter, run.index)
                found.append(Line(label or "value", label, steps, values, index, is_marked=True))
        return found


def _drawn(title: str, lines: Sequence[Line], unit: str = "", **values: object) -> list[Chart]:
    return [Chart(title, lines, unit, **values)] if lines else []  # type: ignore[arg-type]


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


def metric_of(record: EvaluationRecord, name: str) -> float:
    """Return a metric of the user, NaN if it has none or it is no number."""
    value = record.metrics.get(name)
    return float(value) if isinstance(value, int | float) else math.nan
