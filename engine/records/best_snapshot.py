"""The best snapshot of a run, found from the evaluations in `eval.jsonl`.

Owns how a metric and its direction are named. Must not know: settings, how snapshots are written.
"""

import math
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from loopfeed.engine.stream.sinks import EvaluationRecord

_READY_MADE = {"top1": True, "top5": True, "loss": False}
_OWN = re.compile(r"([A-Za-z_]\w*):(max|min)")


class BestMetric(NamedTuple):
    """A number of an evaluation, and whether larger is better."""

    name: str
    is_larger_better: bool

    @property
    def is_own(self) -> bool:
        """Whether it is a user-defined metric."""
        return self.name not in _READY_MADE

    def value(self, record: EvaluationRecord) -> float:
        """Return the number of an evaluation, or NaN if it has none that is finite."""
        found = record.metrics.get(self.name) if self.is_own else getattr(record, self.name)
        return float(found) if isinstance(found, int | float) and math.isfinite(found) else math.nan


def parse_metric(text: str) -> BestMetric:
    """Parse top1, top5, loss, NAME:max or NAME:min.

    Raises:
        ValueError: if the text is anything else.
    """
    if text in _READY_MADE:
        return BestMetric(text, _READY_MADE[text])
    own = _OWN.fullmatch(text)
    if own is None or own[1] in _READY_MADE:
        raise ValueError(
            f"a metric must be top1, top5, loss, or a metric of your own as NAME:max or NAME:min, got {text!r}"
        )
    return BestMetric(own[1], own[2] == "max")


def best_step(evaluations: Sequence[EvaluationRecord], steps: Collection[int], metric: BestMetric) -> int | None:
    """Return which of the steps was evaluated best, the earliest of equals; None if none has a number.

    Args:
        evaluations: the evaluations of the run; of several at one step the last counts.
        steps: the steps of the snapshots.
        metric: the number to compare.
    """
    among = set(steps)
    values = {each.step: metric.value(each) for each in evaluations if each.step in among}
    known = {step: value for step, value in values.items() if not math.isnan(value)}
    sign = -1 if metric.is_larger_better else 1
    return min(known, key=lambda step: (sign * known[step], step), default=None)
