"""The charts of one run that a notebook shows, of the bins of its log and of its evaluations."""

import math
from collections.abc import Sequence

import numpy as np

from loopfeed.engine.charts.charts import Chart, Line
from loopfeed.engine.records.binned_log import BinnedLog
from loopfeed.engine.records.loss_log import Floats
from loopfeed.engine.stream.sinks import EvaluationRecord

# The smoothed curve averages over about this part of the run, and at least this many steps.
_SMOOTHED_PART, _LEAST_SMOOTHED_STEPS = 0.01, 10.0


def charts_of(bins: BinnedLog, evaluations: Sequence[EvaluationRecord]) -> list[Chart]:
    """Return the charts of the loss, the accuracies and the learning rate; one without a number is left out.

    Args:
        bins: the columns "loss" and, if it is known, "lr".
        evaluations: the evaluations, in order.
    """
    used = bins.used
    if not used.any():
        return []
    step, loss = bins.part("high", "step")[used], bins.mean("loss")[used]
    smoothed = smooth(step, loss, smoothing_steps(step))
    lines = [Line("smoothed", "", step, smoothed, 0), Line("each step", "", step, loss, 0, is_faint=True)]
    if bins.width > 1:
        lines[1] = Line(f"mean of {bins.width:,} steps", "", step, loss, 0, is_faint=True)
    charts = [Chart("Loss of the training", lines, from_zero=False)]
    at = np.array([each.step for each in evaluations], np.float64)
    tops = [("top-1", np.array([100 * each.top1 for each in evaluations]))]
    tops.append(("top-5", np.array([100 * each.top5 for each in evaluations])))
    lines = [
        Line(name, name, at, values, index, is_marked=True)
        for index, (name, values) in enumerate(tops)
        if np.isfinite(values).any()
    ]
    charts += [Chart("Accuracy", lines, "%", from_zero=False, most=100.0)] if lines else []
    rate = bins.mean("lr")[used]
    charts += [Chart("Learning rate", [Line("value", "", step, rate, 0)])] if np.isfinite(rate).any() else []
    return charts


def smoothing_steps(step: Floats) -> float:
    """Return the time constant of the smoothed loss of a run, in steps; `step` [n] ascends, n > 0."""
    return max(_LEAST_SMOOTHED_STEPS, _SMOOTHED_PART * float(step[-1]))


def smooth(step: Floats, values: Floats, smoothing_steps: float) -> Floats:
    """Return an exponential moving average without start-up bias; NaN values are left out, and stay NaN.

    Args:
        step: [n], ascending; a gap of d steps weights what came before by exp(-d / `smoothing_steps`).
        values: [n].
        smoothing_steps: the time constant.
    """
    total = weight = 0.0
    before = step[0] - 1 if len(step) else 0.0
    smoothed = np.full(len(values), np.nan)
    for index, (at, value) in enumerate(zip(step.tolist(), values.tolist(), strict=True)):
        kept = math.exp(-(at - before) / smoothing_steps)
        if not math.isnan(value):
            total, weight, before = kept * total + (1 - kept) * value, kept * weight + (1 - kept), at
            smoothed[index] = total / weight
    return smoothed
