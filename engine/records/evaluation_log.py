"""Reads `RUN/eval.jsonl` while it grows, finds the best evaluation in it, and words it.

Owns what counts as a readable evaluation, and as the best. Must not know: settings,
terminals, jax, how an evaluation is computed or a snapshot written.
"""

import json
import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

from loopfeed.engine.objective.best_metric import BestMetric, parse_metric
from loopfeed.engine.records.limits import LONGEST_LINE_BYTES
from loopfeed.engine.records.loss_log import EVALUATION_LOG_NAME, GrowingLog
from loopfeed.engine.stream.sinks import EvaluationRecord, loss_number

_MAX_COUNT = 2**53  # above it a float64 is no longer exact


class EvaluationLog:
    """A reader of an `eval.jsonl` that may still grow, as `GrowingLog`; a line that is not an evaluation is skipped."""

    def __init__(self, path: Path) -> None:
        self._path, self._log = path, GrowingLog(path, LONGEST_LINE_BYTES)
        self._records: tuple[EvaluationRecord, ...] = ()

    def read(self) -> tuple[EvaluationRecord, ...]:
        """Return all evaluations so far in file order, or `()` if there is no file; raise OSError if reading fails.

        Lists among the metrics, which can be large, are those of the newest evaluation alone.
        """
        is_more = True
        while is_more:
            new = self._log.read()
            if new.is_missing:
                self._log = GrowingLog(self._path, LONGEST_LINE_BYTES)
            if new.is_missing or new.restarted:
                self._records = ()
            if new.lines:
                found = list(self._records)
                for record in filter(None, map(_parse, new.lines)):
                    found[-1:] = [each.without_lists() for each in found[-1:]]
                    found.append(record)
                self._records = tuple(found)
            is_more = new.more
        return self._records


def _parse(line: bytes) -> EvaluationRecord | None:
    """Parse a line; return None if it is not an evaluation. A missing or null time or loss becomes NaN."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    step, num_images = value.get("step"), value.get("num_images")
    if not (_is_count(step) and _is_count(num_images)):
        return None
    top1, top5, loss, time_s = (_number(value.get(name)) for name in ("top1", "top5", "loss", "time"))
    has_top1, has_top5 = (value.get(name) is not None for name in ("top1", "top5"))
    # Below six classes there is no top-5, and without classes there is neither.
    if ((has_top1 or has_top5) and not 0 <= top1 <= 1) or (has_top5 and not 0 <= top5 <= 1):
        return None
    metrics = value.get("metrics")
    return EvaluationRecord(
        step=step,
        num_images=num_images,
        top1=top1,
        top5=top5,
        loss=loss,
        time=time_s,
        metrics=metrics if isinstance(metrics, dict) else {},
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _number(value: Any) -> float:
    return float(value) if type(value) is float or _is_count(value) else float("nan")


def value_of(metric: BestMetric, record: EvaluationRecord) -> float:
    """Return the number of an evaluation that a metric names, or NaN if it has none that is finite."""
    found = record.metrics.get(metric.name) if metric.is_own else getattr(record, metric.name)
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else math.nan


def compared_by(evaluations: Collection[EvaluationRecord], given: str | None) -> BestMetric:
    """Return what says which of some evaluations is best: the setting `keep_best`, else top-1, else the loss."""
    if given is None and evaluations and all(math.isnan(each.top1) for each in evaluations):
        return BestMetric("loss", False)
    return parse_metric(given or "top1")


def value_text(metric: BestMetric, value: float) -> str:
    """Return a number of a metric as people are shown it: an accuracy in percent, a dash for NaN."""
    if math.isnan(value):
        return "–"
    return f"{100 * value:.2f} %" if metric.is_accuracy else loss_number(value)


def best_words(record: EvaluationRecord, given: str | None, *, is_brief: bool = False) -> str:
    """Return the best evaluation in words, such as "best top-1 97.50 %".

    Args:
        record: the best evaluation.
        given: the setting `keep_best`.
        is_brief: whether to leave out "top-1", which is what a best in percent is unless it says otherwise.
    """
    metric = compared_by([record], given)
    title = "" if is_brief and metric.name == "top1" else f"{metric.title} "
    return f"best {title}{value_text(metric, value_of(metric, record))}"


def describe_evaluations(evaluations: Sequence[EvaluationRecord], given: str | None) -> str:
    """Return the last evaluation and the best in words; there must be one, and `given` is the setting `keep_best`."""
    last, metric = evaluations[-1], compared_by(evaluations, given)
    best = best_evaluation(evaluations, metric)
    if best is None:
        return f"loss {last.loss:z.4f} at step {last.step:,}"
    numbers = [value_text(metric, value_of(metric, each)) for each in (last, best)]
    return f"{metric.title} {numbers[0]}, best {numbers[1]} at step {best.step:,}"


def best_evaluation(evaluations: Iterable[EvaluationRecord], metric: BestMetric) -> EvaluationRecord | None:
    """Return the best of some evaluations, the earliest of equals; None if none has a finite number.

    Args:
        evaluations: some evaluations of a run; of several at one step the last counts.
        metric: the number to compare.
    """
    latest = {each.step: each for each in evaluations}
    known = [each for each in latest.values() if not math.isnan(value_of(metric, each))]
    sign = -1 if metric.is_larger_better else 1
    return min(known, key=lambda each: (sign * value_of(metric, each), each.step), default=None)


def better_of(best: EvaluationRecord | None, record: EvaluationRecord, given: str | None) -> EvaluationRecord | None:
    """Return the best evaluation after another one, as `best_evaluation` with what `compared_by` says of both."""
    known = [record] if best is None else [best, record]
    return best_evaluation(known, compared_by(known, given))


def best_until(run: Path, step: int, given: str | None) -> EvaluationRecord | None:
    """Return the best evaluation of a run folder up to a step, by what `compared_by` says; None if none can be read."""
    with suppress(OSError):
        records = [each for each in EvaluationLog(run / EVALUATION_LOG_NAME).read() if each.step <= step]
        return best_evaluation(records, compared_by(records, given))
    return None


def best_step(evaluations: Iterable[EvaluationRecord], steps: Collection[int], metric: BestMetric) -> int | None:
    """Return which of some steps, such as those of the snapshots, was evaluated best, as `best_evaluation`."""
    among = set(steps)
    best = best_evaluation([each for each in evaluations if each.step in among], metric)
    return None if best is None else best.step
