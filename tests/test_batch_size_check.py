"""Metrics that depend on the batch size are refused at the start; those that do not are accepted."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed import evaluate, train
from loopfeed.engine.feed.label_form import LabelForm
from loopfeed.engine.objective.batch_size_check import check_batch_size
from loopfeed.engine.objective.metrics import (
    Metric,
    as_metrics,
    balanced_accuracy,
    confusion_matrix,
    expected_calibration_error,
    mean_average_precision,
    top_k,
)
from loopfeed.engine.objective.objective import Objective
from tests.toy import Linear, toy_batch, toy_config

BITS = LabelForm.of(np.zeros((2, 3), bool), 2, "these labels")


def check(metrics, *, outputs=(8, 3), dtype=jnp.float32, label_form=None):
    said: list[str] = []
    objective = Objective(metrics=as_metrics(metrics), label_form=label_form)
    shapes = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), outputs, is_leaf=lambda s: type(s) is tuple)
    check_batch_size(objective, shapes, said.append)
    return said


def summed(update, *, merge: Any = jnp.add, finish: Any = lambda state: state[0] / state[1]) -> Metric:
    """A metric of two numbers, to which `update(outputs, labels, weights)` adds."""
    return Metric(lambda: jnp.zeros(2), lambda state, *batch: state + jnp.stack(update(*batch)), merge, finish)


def hits(logits, labels):
    return (logits.argmax(axis=1) == labels).astype(jnp.float32)


WRONG: dict[str, Any] = {
    "forgot": summed(lambda logits, labels, weights: [hits(logits, labels).sum(), jnp.float32(len(labels))]),
    "half_forgot": summed(lambda logits, labels, weights: [(hits(logits, labels) * weights).sum(), len(labels) * 1.0]),
    "mean_of_means": summed(lambda logits, labels, w: [(hits(logits, labels) * w).sum() / w.sum(), jnp.float32(1)]),
    "largest": Metric(lambda: jnp.zeros(()), lambda s, logits, *_: jnp.maximum(s, logits.max()), jnp.maximum, abs),
    "of_the_batch": lambda logits, labels: jnp.abs(logits - logits.mean(axis=0)).max(axis=1),
    "matrix": Metric(
        lambda: jnp.zeros((3, 3)),
        lambda state, logits, *_: state + jnp.einsum("bi,bj->ij", logits, logits),
        jnp.add,
        lambda state: state,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_metric_that_depends_on_the_batch_size_is_refused(name):
    number = r"-?\d[\d.e+-]*"
    message = (
        rf"the metric {name} must not depend on the batch size, but of the same 48 random examples it is {number}"
        rf"(?: at \[0, \d\])? in one batch, and {number} in two batches of 32, of which the last has 16 padding rows: "
    )
    with pytest.raises(ValueError, match=message):
        check({"top1": top_k(1), name: WRONG[name]})


def test_a_merge_that_loses_a_state_is_refused():
    def right(logits, labels, weights):
        return [(hits(logits, labels) * weights).sum(), weights.sum()]

    assert check({"right": summed(right)}) == []
    message = "the metric lost must be the same of states that are merged, but of the same 48 random examples it is 0.7"
    with pytest.raises(ValueError, match=message):
        check({"lost": summed(right, merge=lambda one, other: one)})


@pytest.mark.parametrize(("num_classes", "dtype"), [(1, jnp.float16), (3, jnp.float32), (1000, jnp.bfloat16)])
def test_metrics_of_class_numbers_are_accepted(num_classes, dtype):
    metrics = {
        "top1": top_k(1),
        "balanced": balanced_accuracy(num_classes),
        "calibration": expected_calibration_error(),
        "confusion": confusion_matrix(min(num_classes, 3)),
        "confidence": lambda logits, labels: jax.nn.softmax(logits).max(axis=1),
        "undefined": lambda logits, labels: jnp.full(len(labels), jnp.nan),
        "summed_narrow": summed(
            lambda logits, labels, weights: [(logits.max(axis=1) * weights.astype(dtype)).sum(), weights.sum()]
        ),
    }
    assert check(metrics, outputs=(8, num_classes), dtype=dtype) == []


def test_metrics_of_other_labels_and_outputs_are_accepted():
    assert check({"precision": mean_average_precision(3)}, label_form=BITS) == []
    wrong_bits = {"wrong": lambda outputs, labels: ((outputs["bits"] > 0) != labels).sum(axis=1)}
    assert check(wrong_bits, outputs={"bits": (8, 3), "others": (8, 2, 2)}, label_form=BITS) == []
    assert check({"top1": lambda outputs, labels: hits(outputs["logits"], labels)}, outputs={"logits": (8, 3)}) == []


def test_a_metric_that_random_numbers_break_is_not_checked_and_that_is_said():
    def only_eights(logits, labels):
        return logits.reshape(8, 3)[:, 0]

    (said,) = check({"eights": only_eights})
    assert said.startswith(
        "whether the metrics depend on the batch size was not checked; on random numbers they fail: "
    )


def test_a_run_and_an_evaluation_refuse_it_before_they_compile(tmp_path):
    said: list[str] = []
    parts: dict[str, Any] = {"model": Linear(), "evaluation": toy_batch(99, batch=13)}
    forgot = {"forgot": WRONG["forgot"]}
    with pytest.raises(ValueError, match="the metric forgot must not depend on the batch size"):
        train(toy_config(steps=2), batches=toy_batch, metrics=forgot, notify=said.append, **parts)
    assert not any(line.startswith("compiled") for line in said)
    train(toy_config(steps=2, run_dir=tmp_path), batches=toy_batch, metrics={"forgot": top_k(1)}, **parts)
    with pytest.raises(ValueError, match=re.escape("of which the last has 16 padding rows: leave out rows whose")):
        evaluate(tmp_path, metrics=forgot, **parts)
    assert math.isfinite(evaluate(tmp_path, metrics={"forgot": top_k(1)}, **parts).record.metrics["forgot"])
