"""The ready-made losses and metrics against optax, plain NumPy and exact definitions, whole and in parts."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from loopfeed.engine.objective.losses import LOSSES
from loopfeed.engine.objective.metrics import (
    Metric,
    balanced_accuracy,
    confusion_matrix,
    expected_calibration_error,
    mean_average_precision,
    mean_of,
    top_k,
)

K, N = 5, 203


def data(seed=0):
    random = np.random.default_rng(seed)
    labels = random.integers(K, size=N)
    logits = random.normal(size=(N, K)).astype(np.float32)
    logits[np.arange(N), labels] += 1
    return logits, labels


def value_of(metric: Metric, outputs, labels, *, batch=32, parts=1) -> Any:
    """The metric over batches of which the last is padded; with `parts`, merged from that many accumulators."""
    states = [metric.init() for _ in range(parts)]
    update = jax.jit(metric.update)
    for number, start in enumerate(range(0, len(outputs), batch)):
        rows = slice(start, start + batch)
        count = len(outputs[rows])
        padded = [np.resize(each[rows], (batch, *each.shape[1:])) for each in (outputs, labels)]
        weights = (np.arange(batch) < count).astype(np.float32)
        states[number % parts] = update(states[number % parts], *map(jnp.asarray, padded), weights)
    total = states[0]
    for state in states[1:]:
        total = metric.merge(total, state)
    return np.asarray(metric.finish(total))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("k", [1, 3, K])
def test_top_k_counts_as_numpys_order(k, parts):
    logits, labels = data()
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    assert value_of(top_k(k), logits, labels, parts=parts) == np.float32((order == labels[:, None]).any(axis=1).mean())


def test_equal_and_nan_logits_rank_by_class_and_as_wrong():
    logits = np.array([[1, 1, 0], [np.nan, 0, 0], [0, 0, 0]], np.float32)
    assert value_of(top_k(1), logits, np.array([0, 0, 1])) == np.float32(1 / 3)
    assert value_of(top_k(5), logits, np.array([0, 0, 1])) == np.float32(2 / 3)  # also with fewer classes than k
    with pytest.raises(ValueError, match="k of top_k must be at least 1, got 0"):
        top_k(0)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_confusion_matrix_and_balanced_accuracy_are_those_of_numpy(parts):
    logits, labels = data()
    labels[labels == 3] = 1  # a class without examples
    expected = np.zeros((K, K), int)
    np.add.at(expected, (labels, logits.argmax(axis=1)), 1)
    assert np.array_equal(value_of(confusion_matrix(K), logits, labels, parts=parts), expected)
    recalls = [(logits.argmax(axis=1) == labels)[labels == each].mean() for each in range(K) if (labels == each).any()]
    np.testing.assert_allclose(value_of(balanced_accuracy(K), logits, labels, parts=parts), np.mean(recalls), rtol=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_calibration_error_is_that_of_its_definition(parts):
    logits, labels = data()
    exponent = np.exp(logits.astype(float))
    probabilities = exponent / exponent.sum(axis=1, keepdims=True)
    confidence, is_correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    edges, expected = np.linspace(0, 1, 11), 0.0
    for low, high in pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            expected += inside.mean() * abs(is_correct[inside].mean() - confidence[inside].mean())
    found = value_of(expected_calibration_error(10), logits, labels, parts=parts)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def average_precision(scores, is_positive):
    """The exact one, from the order of all scores."""
    order = np.argsort(-scores, kind="stable")
    hits = is_positive[order]
    return (np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits].mean()


def test_binned_average_precision_is_near_the_exact_one():
    logits, labels = data()
    is_positive = np.zeros((N, K), bool)
    is_positive[np.arange(N), labels] = True
    is_positive[:, 3] = False  # a label without a positive example is left out
    exact = np.mean([average_precision(logits[:, each], is_positive[:, each]) for each in (0, 1, 2, 4)])
    for parts in (1, 3):
        found = value_of(mean_average_precision(K), logits, is_positive, parts=parts)
        assert abs(found - exact) < 0.01
    assert value_of(mean_average_precision(K), 50 * (2 * is_positive - 1.0), is_positive) == 1


NAN_LOGITS = np.array([[2, 0, 0], [np.nan, 1, 0], [0, 2, 0], [np.nan] * 3, [0, 0, 2]], np.float32)
"""Logits of five images of the classes 0, 0, 1, 2 and 2: three are right, two have NaN."""


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (top_k(1), 3 / 5),
        (top_k(3), 3 / 5),
        (balanced_accuracy(3), (1 / 2 + 1 + 1 / 2) / 3),
        (confusion_matrix(3), np.eye(3, dtype=int)),  # the images with NaN are in no column
        (expected_calibration_error(), np.nan),
    ],
)
def test_an_image_with_nan_logits_is_wrong_and_predicted_as_no_class(metric, expected, parts):
    found = value_of(metric, NAN_LOGITS, np.array([0, 0, 1, 2, 2]), batch=2, parts=parts)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("labels", [np.eye(3)[[0, 0, 1, 2, 2]], np.ones((5, 3)), np.zeros((5, 3))])
def test_average_precision_with_nan_logits_is_undefined_unless_in_padding(labels, parts):
    metric = mean_average_precision(3)
    assert np.isnan(value_of(metric, NAN_LOGITS, labels, batch=2, parts=parts))
    logits = jnp.asarray(NAN_LOGITS)[:2]
    state = metric.update(metric.init(), logits, jnp.ones((2, 3)), jnp.array([1.0, 0.0]))
    assert metric.finish(state) == 1  # the second image, with NaN, is padding


@pytest.mark.parametrize(
    ("metric", "labels"),
    [
        (top_k(1), jnp.zeros(2, jnp.int32)),
        (balanced_accuracy(3), jnp.zeros(2, jnp.int32)),
        (expected_calibration_error(), jnp.zeros(2, jnp.int32)),
        (mean_average_precision(3), jnp.ones((2, 3))),
        (mean_of(lambda outputs, _: outputs[:, 0]), None),
    ],
)
def test_a_metric_of_no_images_is_undefined(metric, labels):
    assert np.isnan(metric.finish(metric.init()))
    state = metric.update(metric.init(), jnp.zeros((2, 3)), labels, jnp.zeros(2))
    assert np.isnan(metric.finish(metric.merge(state, metric.init())))


def test_a_mean_keeps_its_digits_over_many_batches_and_ignores_padding():
    metric = mean_of(lambda outputs, labels: outputs)
    state, _ = jax.lax.scan(
        lambda state, _: (metric.update(state, jnp.array([0.1, jnp.nan]), None, jnp.array([1.0, 0.0])), None),
        metric.init(),
        length=300_000,
    )
    np.testing.assert_allclose(metric.finish(state), np.float32(0.1), rtol=1e-6)


def test_ready_made_losses_are_optaxs():
    logits, labels = data()
    bits = np.random.default_rng(1).integers(2, size=(N, K))
    ones = jnp.ones(N)
    found = LOSSES["cross-entropy"](jnp.asarray(logits), jnp.asarray(labels), ones)
    np.testing.assert_allclose(found, optax.softmax_cross_entropy_with_integer_labels(logits, labels), rtol=1e-5)
    soft = jax.nn.softmax(3 * logits[::-1])
    found = LOSSES["cross-entropy"](jnp.asarray(logits), soft, ones)
    np.testing.assert_allclose(found, optax.softmax_cross_entropy(logits, soft), rtol=1e-5)
    found = LOSSES["binary-cross-entropy"](jnp.asarray(logits), jnp.asarray(bits, bool), ones)
    np.testing.assert_allclose(found, optax.sigmoid_binary_cross_entropy(logits, bits).mean(axis=1), rtol=1e-5)
    found = LOSSES["mean-squared-error"](jnp.asarray(logits), jnp.asarray(bits), ones)
    np.testing.assert_allclose(found, np.square(logits - bits).mean(axis=1), rtol=1e-5)
    assert LOSSES["mean-squared-error"](jnp.ones((4, 1)), jnp.zeros(4), jnp.ones(4)).tolist() == [1] * 4
    assert np.isnan(LOSSES["cross-entropy"](jnp.zeros((2, 3)), jnp.array([3, -1]), jnp.ones(2))).all()
