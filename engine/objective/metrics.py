"""Metrics: numbers about a model's outputs that are accumulated on the device, exactly over batches.

Owns the interface of a metric and the ready-made ones. Does not depend on models, batches or the loop.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped

from loopfeed.engine.given_values import describe_given

type PerExample = Callable[[Any, Any], Shaped[Array, "B"]]
"""(outputs of the model, labels) → a real number or boolean for each example."""


class Metric(NamedTuple):
    """An accumulator of fixed shape, which stays on the device.

    Attributes:
        init: () → the state before the first batch, a pytree of arrays.
        update: (state, outputs, labels, weights) → the state with a batch added. An example with the weight 0 is
            padding and must not count.
        merge: (state, state) → the state of both parts together.
        finish: state → a number, or an array of fixed shape.

    Example:
        >>> largest = Metric(
        ...     init=lambda: jnp.zeros(()),
        ...     update=lambda state, outputs, labels, weights: jnp.maximum(state, (outputs * weights[:, None]).max()),
        ...     merge=jnp.maximum,
        ...     finish=lambda state: state,
        ... )
        >>> state = largest.update(largest.init(), jnp.array([[1.0], [3.0], [9.0]]), None, jnp.array([1.0, 1.0, 0.0]))
        >>> float(largest.finish(largest.merge(state, largest.init())))
        3.0
    """

    init: Callable[[], Any]
    update: Callable[[Any, Any, Any, Float32[Array, "B"]], Any]
    merge: Callable[[Any, Any], Any]
    finish: Callable[[Any], Shaped[Array, "..."]]


def as_metrics(given: Mapping[str, Metric | PerExample] | None) -> dict[str, Metric]:
    """Return the metrics by name, with each plain function made a `mean_of`."""
    return {
        name: each if isinstance(each, Metric) else mean_of(each, name=f"the metric {name}")
        for name, each in (given or {}).items()
    }


class _Mean(NamedTuple):
    """A sum with its rounding error, as `add_compensated` keeps it."""

    total: Float32[Array, ""]
    lost: Float32[Array, ""]
    weight: Float32[Array, ""]


def mean_of(function: PerExample, *, name: str = "a metric") -> Metric:
    """Return the metric that is the mean of a function's values over all examples.

    Args:
        function: (outputs, labels) → real numbers or booleans, one for each example.
        name: what messages call the metric.

    Raises:
        ValueError: by `update`, while it is traced, if the function returns something else.

    Example:
        >>> error = mean_of(lambda outputs, labels: abs(outputs[:, 0] - labels))
        >>> state = error.update(error.init(), jnp.array([[1.0], [2.0]]), jnp.array([1.5, 0.5]), jnp.ones(2))
        >>> float(error.finish(state))
        1.0
    """

    def init() -> _Mean:
        zero = jnp.zeros((), jnp.float32)
        return _Mean(zero, zero, zero)

    def update(state: _Mean, outputs: Any, labels: Any, weights: Float32[Array, "B"]) -> _Mean:
        values = _checked_values(function(outputs, labels), len(weights), name)
        return _add(state, jnp.where(weights > 0, values * weights, 0).sum(), weights.sum())

    def merge(one: _Mean, other: _Mean) -> _Mean:
        return _add(one, other.total - other.lost, other.weight)

    def finish(state: _Mean) -> Float32[Array, ""]:
        return state.total / state.weight

    return Metric(init, update, merge, finish)


def _checked_values(values: Any, num_examples: int, name: str) -> Float32[Array, "{num_examples}"]:
    """Return the values of a metric; raise ValueError if they have another form."""
    is_array = hasattr(values, "shape") and hasattr(values, "dtype")
    kinds = jnp.floating, jnp.integer, jnp.bool_
    is_real = is_array and any(jnp.issubdtype(values.dtype, kind) for kind in kinds)
    if not is_real or values.shape != (num_examples,):
        raise ValueError(
            f"{name} must return real numbers or booleans [{num_examples}], one for each example, but returned "
            f"{describe_given(values)}: do not average over the batch, which the program does, or give a "
            "loopfeed.Metric"
        )
    return jnp.asarray(values).astype(jnp.float32)


def _add(state: _Mean, value: Float32[Array, ""], weight: Float32[Array, ""]) -> _Mean:
    return _Mean(*add_compensated(state.total, state.lost, value), state.weight + weight)


def _counts(shape: tuple[int, ...]) -> Callable[[], jax.Array]:
    return lambda: jnp.zeros(shape, jnp.int32)


def top_k(k: int) -> Metric:
    """Return the fraction of examples whose class is among the `k` largest logits.

    Equal logits rank in the order of their classes, as in `lax.top_k`; an example with a NaN logit is not correct.

    Raises:
        ValueError: if `k` is less than 1.

    Example:
        >>> metric = top_k(2)
        >>> logits, labels = jnp.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), jnp.array([1, 2])
        >>> float(metric.finish(metric.update(metric.init(), logits, labels, jnp.ones(2))))
        0.5
    """
    if k < 1:
        raise ValueError(f"k of top_k must be at least 1, got {k}")

    def correct(logits: Float[Array, "B K"], labels: Int[Array, "B"]) -> Bool[Array, "B"]:
        return rank_of(logits, labels) < k

    return mean_of(correct)


NO_RANK = 2**31 - 1
"""Rank of a label that no number of classes includes."""


def rank_of(logits: Float[Array, "B K"], labels: Int[Array, "B"]) -> Int32[Array, "B"]:
    """Return how many classes rank before the label; NO_RANK if a logit is NaN or the label is not a class."""
    logits = logits.astype(jnp.float32)
    classes = jnp.arange(logits.shape[1])
    own = jnp.take_along_axis(logits, jnp.clip(labels, 0, logits.shape[1] - 1)[:, None], axis=1)
    ahead = (logits > own) | ((logits == own) & (classes < labels[:, None]))
    is_unranked = jnp.isnan(logits).any(axis=1) | (labels < 0) | (labels >= logits.shape[1])
    return jnp.where(is_unranked, NO_RANK, ahead.sum(axis=1, dtype=jnp.int32))


def confusion_matrix(num_classes: int) -> Metric:
    """Return the confusion matrix: row = class of the label, column = class with the largest logit.

    Labels that are not classes do not count, and an example with a NaN logit, which has no largest one, is in no
    column. Counts are exact up to 2³¹ - 1.

    Example:
        >>> metric = confusion_matrix(2)
        >>> logits, labels = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), jnp.array([0, 1, 1])
        >>> metric.finish(metric.update(metric.init(), logits, labels, jnp.ones(3))).tolist()
        [[1, 0], [1, 1]]
    """

    def update(
        state: Int32[Array, "K K"],
        logits: Float[Array, "B outputs"],
        labels: Int[Array, "B"],
        weights: Float32[Array, "B"],
    ) -> Int32[Array, "K K"]:
        classes = jnp.arange(num_classes)
        rows = (labels[:, None] == classes) & (weights > 0)[:, None]
        columns = _predicted(logits)[:, None] == classes
        # A product of one-hot matrices: a scatter is slow, or not deterministic, on GPUs. Exact below 2²⁴ per batch.
        added = jnp.einsum("bi,bj->ij", rows.astype(jnp.float32), columns.astype(jnp.float32), precision="highest")
        return state + added.astype(jnp.int32)

    return Metric(_counts((num_classes, num_classes)), update, jnp.add, lambda state: state)


def _predicted(logits: Float[Array, "B K"]) -> Int32[Array, "B"]:
    """Return the class with the largest logit, the first of equal ones; -1 if a logit is NaN."""
    logits = logits.astype(jnp.float32)
    return jnp.where(jnp.isnan(logits).any(axis=1), -1, jnp.argmax(logits, axis=1).astype(jnp.int32))


def balanced_accuracy(num_classes: int) -> Metric:
    """Return the mean, over the classes that have examples, of the fraction that is classified correctly.

    An example with a NaN logit is not correct. Without examples the metric is NaN.

    Example:
        >>> metric = balanced_accuracy(2)
        >>> logits, labels = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), jnp.array([0, 1, 1])
        >>> float(metric.finish(metric.update(metric.init(), logits, labels, jnp.ones(3))))
        0.75
    """

    def update(
        state: Int32[Array, "2 K"],
        logits: Float[Array, "B outputs"],
        labels: Int[Array, "B"],
        weights: Float32[Array, "B"],
    ) -> Int32[Array, "2 K"]:
        member = (labels[:, None] == jnp.arange(num_classes)) & (weights > 0)[:, None]
        is_correct = (_predicted(logits) == labels)[:, None]
        return state + jnp.stack([member.sum(axis=0), (member & is_correct).sum(axis=0)]).astype(jnp.int32)

    def finish(state: Int32[Array, "2 K"]) -> Float32[Array, ""]:
        totals, correct = state
        recalls = correct.astype(jnp.float32) / jnp.maximum(totals, 1).astype(jnp.float32)
        return recalls.sum() / (totals > 0).sum().astype(jnp.float32)

    return Metric(_counts((2, num_classes)), update, jnp.add, finish)


class _Bins(NamedTuple):
    """Per bin: the number of examples, the number of correct ones, and the sum of confidences."""

    num_examples: Int32[Array, "bins"]
    num_correct: Int32[Array, "bins"]
    confidence: Float32[Array, "bins"]


def expected_calibration_error(num_bins: int = 15) -> Metric:
    """Return the expected calibration error with bins of equal width (Guo et al., 2017, arXiv:1706.04599).

    It is the mean distance, weighted by the number of examples in a bin, between accuracy and mean confidence, where
    the confidence is the largest softmax probability. It is NaN without examples, and if a logit is NaN or +infinity,
    of which the softmax is NaN.

    Example:
        >>> metric = expected_calibration_error()
        >>> state = metric.update(metric.init(), jnp.zeros((2, 2)), jnp.array([0, 0]), jnp.ones(2))
        >>> float(metric.finish(state))  # right both times, with a confidence of a half
        0.5
    """

    def init() -> _Bins:
        counts = jnp.zeros(num_bins, jnp.int32)
        return _Bins(counts, counts, jnp.zeros(num_bins, jnp.float32))

    def update(
        state: _Bins, logits: Float[Array, "B K"], labels: Int[Array, "B"], weights: Float32[Array, "B"]
    ) -> _Bins:
        probabilities = jax.nn.softmax(logits.astype(jnp.float32))
        confidence = probabilities.max(axis=1)
        is_correct = jnp.argmax(probabilities, axis=1) == labels
        # Bins are open at their lower end, as in the paper: (0, 1/n], (1/n, 2/n], …
        bins = jnp.clip(jnp.ceil(confidence * num_bins).astype(jnp.int32) - 1, 0, num_bins - 1)
        member = (bins[:, None] == jnp.arange(num_bins)) & (weights > 0)[:, None]
        return _Bins(
            state.num_examples + member.sum(axis=0, dtype=jnp.int32),
            state.num_correct + (member & is_correct[:, None]).sum(axis=0, dtype=jnp.int32),
            state.confidence + jnp.where(member, confidence[:, None], 0).sum(axis=0),
        )

    def finish(state: _Bins) -> Float32[Array, ""]:
        gaps = jnp.abs(state.num_correct.astype(jnp.float32) - state.confidence)
        return gaps.sum() / state.num_examples.sum().astype(jnp.float32)

    return Metric(init, update, lambda one, other: jax.tree.map(jnp.add, one, other), finish)


def mean_average_precision(num_labels: int, num_bins: int = 200) -> Metric:
    """Return the mean average precision of multi-label logits, binned.

    The sigmoid of each logit falls into one of `num_bins` bins of equal width; examples in the same bin count as tied.
    A label's average precision is the sum over the bins, from the highest score, of precision · increase in recall.
    Labels without a positive example are left out of the mean. The metric is NaN if no label has a positive example,
    and if a logit is NaN. The exact value needs all scores at once; with 200 bins the difference is below 0.01 unless
    most scores fall into a few bins.

    Example:
        >>> metric = mean_average_precision(1)
        >>> logits, labels = jnp.array([[2.0], [1.0], [-1.0]]), jnp.array([[1], [0], [1]])
        >>> state = metric.update(metric.init(), logits, labels, jnp.ones(3))
        >>> round(float(metric.finish(state)), 4)  # (1/1 + 2/3) / 2
        0.8333
    """

    def update(
        state: Int32[Array, "2 K bins"],
        logits: Float[Array, "B K"],
        labels: Shaped[Array, "B K"],
        weights: Float32[Array, "B"],
    ) -> Int32[Array, "2 K bins"]:
        scores = jax.nn.sigmoid(logits.astype(jnp.float32))
        bins = jnp.clip((scores * num_bins).astype(jnp.int32), 0, num_bins - 1)
        # One more bin counts the scores that are NaN.
        bins = jnp.where(jnp.isnan(scores), num_bins, bins)
        member = (bins[:, :, None] == jnp.arange(num_bins + 1)) & (weights > 0)[:, None, None]
        is_positive = labels.astype(jnp.bool)[:, :, None]
        return state + jnp.stack([(member & is_positive).sum(axis=0), (member & ~is_positive).sum(axis=0)])

    def finish(state: Int32[Array, "2 K bins"]) -> Float32[Array, ""]:
        counted = state[:, :, :num_bins]
        positives, negatives = (jnp.cumsum(each[:, ::-1], axis=1).astype(jnp.float32) for each in counted)
        precision = positives / jnp.maximum(positives + negatives, 1)
        num_positive = positives[:, -1]
        gained = jnp.diff(positives, axis=1, prepend=0)
        average = (precision * gained).sum(axis=1) / jnp.maximum(num_positive, 1)
        has_positive = num_positive > 0
        mean = jnp.where(has_positive, average, 0).sum() / has_positive.sum()
        return jnp.where(state[:, :, num_bins].any(), jnp.nan, mean)

    return Metric(_counts((2, num_labels, num_bins + 1)), update, jnp.add, finish)


def add_compensated(
    total: Float[Array, ""], lost: Float[Array, ""], value: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the sum with a value added, and its rounding error: the sum was too large by the error.

    A sum that is infinite or NaN has no rounding error, so that an infinite value makes the sum infinite, not NaN.
    """
    added = value - lost
    summed = total + added
    return summed, jnp.where(jnp.isfinite(summed), (summed - total) - added, 0)
