"""Cross entropy: the textbook's, in float32, for any logits that a run may see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.engine.images.augment import one_hot_or_nan
from loopfeed.engine.objective import losses as objective


def cross_entropy(logits, labels):
    """Return the loss of hard labels, converted to targets as in the program."""
    return objective.cross_entropy(logits, one_hot_or_nan(labels, logits.shape[-1]))


def reference(logits, labels):
    """Return the mean of log(sum(exp)) - logit of the label, one image at a time in float64."""
    losses = []
    for row, label in zip(np.asarray(logits, np.float64), labels, strict=True):
        highest = max(row)
        losses.append(highest + np.log(sum(np.exp(value - highest) for value in row)) - row[label])
    return sum(losses) / len(losses)


@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-3, 1.0, 30.0, 1e4]))
@settings(max_examples=40)
def test_equals_the_reference_in_float64(seed, scale):
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((6, 10)) * scale).astype(np.float32)
    labels = random.integers(10, size=6, dtype=np.int32)
    loss = cross_entropy(jnp.asarray(logits), jnp.asarray(labels))
    assert loss.dtype == jnp.float32
    assert loss.shape == ()
    # A few roundings of float32 relative to the largest logit, or to a loss of order 1.
    assert float(loss) == pytest.approx(reference(logits, labels), rel=1e-5, abs=4e-7 * max(1.0, scale))


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_large_logits_give_finite_losses_and_gradients(size):
    logits = jnp.array([[size, -size, 0.0], [size, -size, 0.0]], jnp.float32)
    loss, gradient = jax.value_and_grad(cross_entropy)(logits, jnp.array([0, 1], jnp.int32))
    # Right with certainty costs nothing; wrong with certainty costs the gap.
    assert float(loss) == pytest.approx(size, rel=1e-6)
    np.testing.assert_allclose(gradient, np.array([[0, 0, 0], [0.5, -0.5, 0]]), atol=1e-7)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_short_floats_are_computed_in_float32(dtype):
    random = np.random.default_rng(4)
    logits = jnp.asarray(random.standard_normal((64, 100)), dtype)
    labels = jnp.asarray(random.integers(100, size=64, dtype=np.int32))
    loss, gradient = jax.jit(jax.value_and_grad(cross_entropy))(logits, labels)
    assert loss.dtype == jnp.float32
    # bfloat16 arithmetic would be wrong in the third digit.
    assert float(loss) == pytest.approx(reference(logits.astype(jnp.float32), labels), rel=1e-6)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("label", [-1, 3, 2**31 - 1])
def test_an_invalid_label_makes_the_loss_nan(label):
    assert np.isnan(cross_entropy(jnp.zeros((2, 3)), jnp.array([0, label])))
