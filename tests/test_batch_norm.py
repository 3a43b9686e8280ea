"""Batch norm, alone and with the ReLU behind it, against float64 NumPy and automatic differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.models.layers import batch_norm as module
from loopfeed.models.layers.batch_norm import EPSILON, SAMPLED, RunningStats, stored_relu
from loopfeed.models.layers.convolution import convolution

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("llvms_optimiser")]


def normal(seed, shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def batch_norm(x, scale, bias, running, **options):
    """Compile each call as one program, for the platform of the test."""
    return jax.jit(lambda *arrays: module.batch_norm(*arrays, **options))(x, scale, bias, running)


def plain_batch_norm(x, scale, bias):
    """Straight from the paper, differentiated by JAX."""
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias


FRESH = RunningStats(jnp.zeros(5), jnp.ones(5))


@pytest.mark.parametrize(
    ("shape", "relu", "platform"),
    [
        *(((4, 3, 7, 5), True, platform) for platform in ("cpu", "cuda")),
        *(((2, 1, 1, 5), False, "cpu"), ((1, 8, 8, 5), False, "cuda"), ((1, 1, 17, 5), True, "cpu")),
    ],
    indirect=["platform"],
)
def test_batch_norm_and_its_gradient_are_the_papers(shape, relu, platform):
    x, scale, bias, gradient = normal(0, shape) * 3 + 2, normal(1, (5,)), normal(2, (5,)), normal(3, shape)

    def ours(x, scale, bias):
        return module.batch_norm(x, scale, bias, FRESH, train=True, relu=relu)[0]

    def plain(x, scale, bias):
        y = plain_batch_norm(x, scale, bias)
        return jnp.where(y > 0, y, 0) if relu else y

    @jax.jit
    def both(operands, gradient):
        (y, pullback), (wanted, plain_pullback) = jax.vjp(ours, *operands), jax.vjp(plain, *operands)
        return (y, pullback(gradient)), (wanted, plain_pullback(gradient))

    (y, gradients), (wanted, references) = both((x, scale, bias), gradient)
    # float32 sums in another order; with two values a channel the input's gradient cancels to almost nothing
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-5)
    for found, reference in zip(gradients, references, strict=True):
        np.testing.assert_allclose(found, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_batch_norm_keeps_its_digits_far_from_zero(platform, offset):
    """Against float64. A float32 input near 1e4 is spaced by 1e-3, so its own sum is only that good: 1e-7·offset.

    A card's sums are added up one by one here, and so over fewer values.
    """
    x = normal(0, (8, 16, 16, 5) if platform == "cpu" else (4, 8, 8, 5)) + offset
    exact = np.asarray(x, np.float64)
    y, running = batch_norm(x, jnp.ones(5), jnp.zeros(5), FRESH, train=True)
    mean, var = exact.mean((0, 1, 2)), exact.var((0, 1, 2), ddof=1)
    np.testing.assert_allclose(y, (exact - mean) / np.sqrt(exact.var((0, 1, 2)) + 1e-5), atol=1e-5 + 3e-7 * offset)
    np.testing.assert_allclose(running.mean, 0.1 * mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(running.var, 0.9 + 0.1 * var, rtol=1e-5)


@jax.jit
def compiled_norm(x):
    zero = jnp.zeros(1)
    return module.batch_norm(x, jnp.ones(1), zero, RunningStats(zero, zero), train=True)


@settings(max_examples=30, derandomize=True)
@given(
    st.sampled_from([1, 2, SAMPLED - 1, SAMPLED, SAMPLED + 1, 5 * SAMPLED, 400]),
    st.integers(0, 99),
    st.sampled_from(["first", "last", "any", "none"]),
)
def test_variance_keeps_its_digits_wherever_the_outliers_lie(count, seed, where):
    """The part whose mean the sums are taken about may be nothing like the rest: all of it outliers, or one of it."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(count)
    sampled = -(-count // SAMPLED)
    places = {"first": slice(sampled), "last": slice(-1, None), "any": rng.integers(count, size=3), "none": slice(0)}
    values[places[where]] += 1e4
    x = jnp.asarray(values.reshape(1, 1, count, 1), jnp.float32)
    _, running = compiled_norm(x)
    exact = np.asarray(x, np.float64)
    unbiased = exact.var() * (count / max(count - 1, 1))
    # Some roundings of 6e-8; 64 times as much where the part is all outliers, as the sums cancel to one in 64.
    np.testing.assert_allclose(running.var, [0.1 * unbiased], rtol=3e-5 if where == "first" else 1e-6, atol=1e-7)
    np.testing.assert_allclose(running.mean, [0.1 * exact.mean()], rtol=1e-6, atol=1e-4)


@pytest.mark.usefixtures("on_a_card")
def test_on_a_card_a_channel_with_a_single_outlier_stays_finite():
    """The worst that the one value may be: all digits of the variance may go, and nothing else."""
    x = jnp.zeros((4, 33, 33, 1)).at[0, 16, 16].set(3.3)
    y, running = batch_norm(x, jnp.ones(1), jnp.zeros(1), RunningStats(*jnp.zeros((2, 1))), train=True)
    assert np.isfinite(y).all()
    assert 0 <= running.var[0] <= 1e-3
    np.testing.assert_allclose(running.mean, [0.1 * 3.3 / x.size], atol=1e-4)


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize(("deviations", "lost"), [(0, 1), (3, 10), (15, 226)])
def test_on_a_card_the_loss_of_digits_matches_the_size_of_the_outlier(deviations, lost):
    """The sums cancel to one in 1 + deviations²; added up one by one, they lose up to 20 roundings before."""
    values = np.random.default_rng(0).standard_normal((1, 1, 256, 1)).astype(np.float32)
    values[0, 0, 128] = deviations
    _, running = batch_norm(
        jnp.asarray(values), jnp.ones(1), jnp.zeros(1), RunningStats(*jnp.zeros((2, 1))), train=True
    )
    exact = values.astype(np.float64)
    np.testing.assert_allclose(running.var, [0.1 * exact.var(ddof=1)], rtol=20 * lost * 2**-24)
    np.testing.assert_allclose(running.mean, [0.1 * exact.mean()], rtol=0, atol=20 * (1 + deviations) * 2**-24)


@pytest.mark.usefixtures("platform")
def test_a_stored_relu_and_its_gradient_are_jaxs():
    x, gradient = normal(0, (3, 4)).at[0, 0].set(0).at[0, 1].set(jnp.nan).at[0, 2].set(-0.0), normal(1, (3, 4))
    found, wanted = (
        jax.jit(lambda x, gradient, relu=relu: (relu(x), jax.vjp(relu, x)[1](gradient)[0]))(x, gradient)
        for relu in (stored_relu, jax.nn.relu)
    )
    for each, expected in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(each, expected)


@pytest.mark.usefixtures("platform")
def test_the_gradient_of_relu_at_zero_is_zero():
    """Scale 0 makes every value 0, where the ReLU's derivative is 0, as `jax.nn.relu` has it."""
    x = normal(0, (2, 3, 3, 5))
    bias_gradient = jax.jit(
        jax.grad(lambda bias: module.batch_norm(x, jnp.zeros(5), bias, FRESH, train=True, relu=True)[0].sum())
    )
    np.testing.assert_array_equal(bias_gradient(jnp.zeros(5)), 0)
    np.testing.assert_array_equal(bias_gradient(jnp.ones(5)), 18)


@pytest.mark.usefixtures("platform")
def test_running_statistics_move_by_a_tenth_with_the_unbiased_variance():
    x = jnp.asarray([1.0, 2.0, 3.0, 6.0]).reshape(4, 1, 1, 1)
    _, running = batch_norm(x, jnp.ones(1), jnp.zeros(1), RunningStats(jnp.ones(1), jnp.ones(1) * 2), train=True)
    np.testing.assert_allclose(running.mean, [0.9 * 1 + 0.1 * 3], rtol=1e-6)
    np.testing.assert_allclose(running.var, [0.9 * 2 + 0.1 * 14 / 3], rtol=1e-6)
    _, single = batch_norm(x[:1], jnp.ones(1), jnp.zeros(1), RunningStats(jnp.ones(1), jnp.ones(1)), train=True)
    np.testing.assert_allclose(single.var, [0.9], rtol=1e-6)  # one value: no division by zero


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_bfloat16_activations_keep_float32_statistics(train, relu):
    x = normal(0, (4, 4, 4, 5), jnp.bfloat16)
    y, running = batch_norm(x, jnp.ones(5), jnp.zeros(5), FRESH, train=train, relu=relu)
    assert y.dtype == jnp.bfloat16
    assert running.mean.dtype == running.var.dtype == jnp.float32
    exact, _ = batch_norm(x.astype(jnp.float32), jnp.ones(5), jnp.zeros(5), FRESH, train=train, relu=relu)
    np.testing.assert_allclose(np.asarray(y, np.float32), exact, rtol=2**-8, atol=1e-6)  # rounded once, to 8 bits


@pytest.mark.parametrize("in_loop", [False, True])
def test_the_norm_of_few_values_is_not_computed_from_an_array_that_is_being_overwritten(in_loop):
    """jaxlib 0.12.0 computes the backward pass in place of a product whose first row it reads as the mean's estimate.

    The error of this gradient was 37 times the gradient, in a loop and outside, with XLA's kernels too.
    """
    rng = np.random.default_rng(0)
    x, gradient = (rng.standard_normal((4, 1, 1, 32)).astype(np.float32) for _ in range(2))
    kernel = (rng.standard_normal((1, 1, 32, 32)) / 32**0.5).astype(np.float32)

    def norm(y):
        one, zero = jnp.ones(32, jnp.float32), jnp.zeros(32, jnp.float32)
        return module.batch_norm(y, one, zero, RunningStats(zero, one), train=True, relu=True)[0]

    def plain_norm(y):
        centred = y - y.mean((0, 1, 2))
        return jnp.maximum(centred / jnp.sqrt((centred**2).mean((0, 1, 2)) + EPSILON), 0)

    def loss(kernel, x, gradient, norm):
        for _ in range(3):
            x = norm(convolution(x, kernel))
        return (x * gradient).sum()

    def step(kernel, x, gradient):
        return jax.grad(loss)(kernel, x, gradient, norm)

    def loop(kernel, x, gradient):
        return jax.lax.fori_loop(0, 1, lambda _, of: of + step(of, x, gradient), kernel) - kernel

    found = np.asarray(jax.jit(loop if in_loop else step)(kernel, x, gradient))
    with jax.enable_x64(True):
        wide = (each.astype(np.float64) for each in (kernel, x, gradient))
        expected = np.asarray(jax.jit(jax.grad(loss), static_argnums=3)(*wide, plain_norm))
    # Rounding of float32 through three norms of four values each gave 3e-6.
    assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected)
