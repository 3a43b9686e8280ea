"""The ready losses at their ties, kinks and infinities; the right values are PyTorch 2.9's, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed.engine.images.mixing import WHOLE
from loopfeed.engine.objective.losses import binary_cross_entropy_loss, cross_entropy, cross_entropy_loss
from loopfeed.engine.objective.objective import Objective, smooth_targets

INF = np.inf
ONE = jnp.ones(1)


def value_and_gradient(loss, x, labels):
    return jax.value_and_grad(lambda x: loss(x, jnp.asarray([[labels]]), ONE).sum())(jnp.asarray([[x]], jnp.float32))


@pytest.mark.parametrize(
    ("logit", "target", "value", "gradient"),
    [
        (0.0, 1.0, 0.6931471805599453, -0.5),
        (0.0, 0.0, 0.6931471805599453, 0.5),
        (-0.0, 0.3, 0.6931471805599453, 0.2),
        (-1.5, 0.0, 0.20141327798275244, 0.18242552380635635),
        (2.0, 0.3, 1.5269280110429724, 0.5807970779778824),
        (-100.0, 1.0, 100.0, -1.0),
        (100.0, 0.3, 70.0, 0.7),
        (INF, 0.0, INF, 1.0),
        (INF, 0.3, INF, 0.7),
        # PyTorch's values here are NaN, its gradients these; the values are the limits.
        (-INF, 0.0, 0.0, 0.0),
        (INF, 1.0, 0.0, 0.0),
        (-INF, 0.3, INF, -0.3),
        (-INF, 1.0, INF, -1.0),
    ],
)
def test_binary_cross_entropy(logit, target, value, gradient):
    found = value_and_gradient(binary_cross_entropy_loss, logit, target)
    # A few float32 roundings.
    np.testing.assert_allclose(np.ravel(found[0]), value, rtol=4e-7)
    np.testing.assert_allclose(np.ravel(found[1]), gradient, rtol=4e-7, atol=1e-38)


# Rows with masked classes, and the gradient of the mean cross entropy by them.
MASKED = jnp.array([[1.0, -INF, 2.0], [-INF, 0.0, -INF]])
HARD = [[0.13447071068499755, 0.0, -0.13447071068499755], [0.0, 0.0, 0.0]]
SMOOTHED = [
    [0.11780404401833089, -0.016666666666666666, -0.10113737735166423],
    [-0.016666666666666666, 0.033333333333333326, -0.016666666666666666],
]
SOFT = [[0.009470710684997552, 0.0, -0.009470710684997552], [0.0, 0.0, 0.0]]


def test_a_masked_class_without_target_costs_nothing():
    one_hot, soft = jnp.array([[0, 0, 1.0], [0, 1, 0]]), jnp.array([[0.25, 0, 0.75], [0, 1, 0]])
    by_number = lambda logits: cross_entropy_loss(logits, jnp.array([2, 1]), jnp.ones(2)).mean()  # noqa: E731
    for loss, value, gradient in (
        (by_number, 0.15663084375911143, HARD),
        (lambda logits: cross_entropy(logits, one_hot), 0.15663084375911143, HARD),
        # Smoothing gives a masked class a target, so the loss is infinite, as in PyTorch.
        (lambda logits: cross_entropy(logits, smooth_targets(one_hot, jnp.float32(0.1))), INF, SMOOTHED),
        # PyTorch's value is NaN; this one is the limit.
        (lambda logits: cross_entropy(logits, soft), (0.25 * 1.31326168752 + 0.75 * 0.31326168752) / 2, SOFT),
        (lambda logits: cross_entropy_loss(logits, soft, jnp.ones(2)).mean(), 0.2816308437, SOFT),
    ):
        found = jax.jit(jax.value_and_grad(loss))(MASKED)
        np.testing.assert_allclose(found[0], value, rtol=1e-6)
        np.testing.assert_allclose(found[1], gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("loss", [None, cross_entropy_loss])
def test_of_a_pair_that_is_not_mixed_only_the_own_label_counts(loss):
    """The first image's logit of its partner's class is minus infinity, and its own share is whole."""
    logits, labels = jnp.array([[0.0, -INF, 1.0], [0.5, 1.0, 0.0]]), jnp.array([2, 1], jnp.int32)
    objective, unsmoothed = Objective(loss=loss), jnp.float32(0)
    plain = objective.training_loss(logits, labels, None, unsmoothed)
    mixed = objective.training_loss(logits, labels, jnp.full(2, WHOLE), unsmoothed)
    assert float(mixed) == float(plain) == pytest.approx(0.5 * (0.3132616875 + 0.6802696706), rel=1e-6)
