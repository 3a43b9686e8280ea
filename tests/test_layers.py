"""Batch norm, average pool and the dense layer against float64 NumPy and automatic differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers import RunningStats, batch_norm, dense, global_average_pool


def normal(seed, shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def plain_batch_norm(x, scale, bias):
    """Straight from the paper, differentiated by JAX."""
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias


FRESH = RunningStats(jnp.zeros(5), jnp.ones(5))


@pytest.mark.parametrize("shape", [(4, 3, 7, 5), (2, 1, 1, 5), (1, 8, 8, 5)])
def test_batch_norm_and_its_gradient_are_the_papers(shape):
    x, scale, bias, gradient = normal(0, shape) * 3 + 2, normal(1, (5,)), normal(2, (5,)), normal(3, shape)
    y, pullback = jax.vjp(lambda x, scale, bias: batch_norm(x, scale, bias, FRESH, train=True)[0], x, scale, bias)
    wanted, plain_pullback = jax.vjp(plain_batch_norm, x, scale, bias)
    # float32 sums in another order; with two values a channel the input's gradient cancels to almost nothing
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-5)
    for found, reference in zip(pullback(gradient), plain_pullback(gradient), strict=True):
        np.testing.assert_allclose(found, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_batch_norm_keeps_its_digits_far_from_zero(offset):
    """Against float64. A float32 input near 1e4 is spaced by 1e-3, so its own sum is only that good: 1e-7·offset."""
    x = normal(0, (8, 16, 16, 5)) + offset
    exact = np.asarray(x, np.float64)
    y, running = batch_norm(x, jnp.ones(5), jnp.zeros(5), FRESH, train=True)
    mean, var = exact.mean((0, 1, 2)), exact.var((0, 1, 2), ddof=1)
    np.testing.assert_allclose(y, (exact - mean) / np.sqrt(exact.var((0, 1, 2)) + 1e-5), atol=1e-5 + 3e-7 * offset)
    np.testing.assert_allclose(running.mean, 0.1 * mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(running.var, 0.9 + 0.1 * var, rtol=1e-5)


def test_running_statistics_move_by_a_tenth_with_the_unbiased_variance():
    x = jnp.asarray([1.0, 2.0, 3.0, 6.0]).reshape(4, 1, 1, 1)
    _, running = batch_norm(x, jnp.ones(1), jnp.zeros(1), RunningStats(jnp.ones(1), jnp.ones(1) * 2), train=True)
    np.testing.assert_allclose(running.mean, [0.9 * 1 + 0.1 * 3], rtol=1e-6)
    np.testing.assert_allclose(running.var, [0.9 * 2 + 0.1 * 14 / 3], rtol=1e-6)
    _, single = batch_norm(x[:1], jnp.ones(1), jnp.zeros(1), RunningStats(jnp.ones(1), jnp.ones(1)), train=True)
    np.testing.assert_allclose(single.var, [0.9], rtol=1e-6)  # one value: no division by zero


def test_no_gradient_flows_through_running_statistics():
    def total(x):
        return sum(leaf.sum() for leaf in batch_norm(x, jnp.ones(5), jnp.zeros(5), FRESH, train=True)[1])

    np.testing.assert_array_equal(jax.grad(total)(normal(0, (2, 3, 3, 5))), 0)


def test_evaluation_uses_the_running_statistics_and_leaves_them():
    x, scale, bias = normal(0, (2, 3, 3, 5)), normal(1, (5,)), normal(2, (5,))
    running = RunningStats(normal(3, (5,)), jnp.square(normal(4, (5,))) + 0.5)
    y, after = batch_norm(x, scale, bias, running, train=False)
    np.testing.assert_allclose(y, (x - running.mean) / np.sqrt(running.var + 1e-5) * scale + bias, atol=1e-5)
    assert after is running


@pytest.mark.parametrize("train", [True, False])
def test_bfloat16_activations_keep_float32_statistics(train):
    x = normal(0, (4, 4, 4, 5), jnp.bfloat16)
    y, running = batch_norm(x, jnp.ones(5), jnp.zeros(5), FRESH, train=train)
    assert y.dtype == jnp.bfloat16
    assert running.mean.dtype == running.var.dtype == jnp.float32
    exact, _ = batch_norm(x.astype(jnp.float32), jnp.ones(5), jnp.zeros(5), FRESH, train=train)
    np.testing.assert_allclose(np.asarray(y, np.float32), exact, rtol=2**-8, atol=1e-6)  # rounded once, to 8 bits


def test_global_average_pool_is_the_mean_of_places():
    x = normal(0, (3, 5, 4, 2))
    np.testing.assert_allclose(global_average_pool(x), np.asarray(x, np.float64).mean((1, 2)), rtol=1e-5, atol=1e-7)
    assert global_average_pool(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_dense_is_affine_and_answers_in_float32():
    x, kernel, bias = normal(0, (3, 6)), normal(1, (6, 4)), normal(2, (4,))
    np.testing.assert_allclose(dense(x, kernel, bias), np.asarray(x) @ np.asarray(kernel) + bias, atol=1e-5)
    assert dense(x.astype(jnp.bfloat16), kernel, bias).dtype == jnp.float32
