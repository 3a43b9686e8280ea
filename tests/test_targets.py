"""Label smoothing: optax's formula, and nothing at 0."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from loopfeed.engine.objective.objective import smooth_targets

ONE_HOT = jax.nn.one_hot(jnp.array([0, 3, 1]), 5)
MIXED = 0.7 * ONE_HOT + 0.3 * ONE_HOT[::-1]


@pytest.mark.parametrize("targets", [ONE_HOT, MIXED])
@pytest.mark.parametrize("smoothing", [0.1, 0.5, 1.0])
def test_equals_optax(targets, smoothing):
    smoothed = jax.jit(smooth_targets)(targets, jnp.float32(smoothing))
    assert smoothed.dtype == jnp.float32
    np.testing.assert_allclose(smoothed, optax.smooth_labels(targets, smoothing), rtol=1e-6)
    np.testing.assert_allclose(smoothed.sum(axis=-1), 1, rtol=1e-6)
