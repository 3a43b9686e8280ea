"""Max-pooling and its gradient against XLA's reduce-window and select-and-scatter, ties included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from loopfeed.models.layers.pooling import average_pool, global_max_pool, max_pool

pytestmark = pytest.mark.kernels


def xla_max_pool(x, window, stride, padding):
    margin = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, window, 1), (1, stride, stride, 1), margin)


@settings(max_examples=20, derandomize=True)
@given(st.data())
def test_pool_and_gradient_are_xlas_where_most_windows_hold_ties(data):
    window, stride = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    padding = data.draw(st.integers(0, (window - 1) // 2))
    H, W = (data.draw(st.integers(max(1, window - 2 * padding), 9)) for _ in range(2))
    # Whole numbers: three values make ties, and sums of whole gradients are exact in any order.
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = jnp.asarray(rng.integers(-1, 2, (2, H, W, 3)), jnp.float32)
    size = [(extent + 2 * padding - window) // stride + 1 for extent in (H, W)]
    gradient = jnp.asarray(rng.integers(-9, 9, (2, *size, 3)), jnp.float32)

    @jax.jit
    def both(x, gradient):
        wanted, pullback = jax.vjp(lambda x: xla_max_pool(x, window, stride, padding), x)
        found, ours = jax.vjp(lambda x: max_pool(x, window=window, stride=stride, padding=padding), x)
        return (found, wanted), (ours(gradient)[0], pullback(gradient)[0])

    for found, wanted in both(x, gradient):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("size", "dtype"), [((1, 1), "bfloat16"), ((3, 3), "float32"), ((2, 5), "bfloat16"), ((17, 4), "float32")]
)
def test_a_global_pool_is_a_pool_of_the_whole_image_ties_included(size, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-1, 2, (3, *size, 5)), dtype)
    gradient = jnp.asarray(rng.integers(-9, 9, (3, 5)), dtype)
    flat = x.reshape(3, -1, 5)
    first = np.argmax(flat, axis=1)
    expected = np.zeros(flat.shape)
    np.put_along_axis(expected, first[:, None], np.asarray(gradient)[:, None], axis=1)
    found, pullback = jax.vjp(jax.jit(global_max_pool), x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.max(flat, axis=1))
    np.testing.assert_array_equal(pullback(gradient)[0].reshape(flat.shape), expected)
    # Forward mode: the tangent at the first maximum.
    tangents = jnp.asarray(rng.integers(-9, 9, x.shape), dtype)
    taken = np.take_along_axis(np.asarray(tangents).reshape(flat.shape), first[:, None], axis=1)[:, 0]
    np.testing.assert_array_equal(jax.jvp(global_max_pool, (x,), (tangents,))[1], taken)


def test_windows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="padding below half the window, got window 2, stride 2, padding 1"):
        max_pool(jnp.zeros((1, 4, 4, 1)), window=2, padding=1)
    with pytest.raises(ValueError, match="3×3 window does not fit into an input of 2×2 px; use larger images"):
        max_pool(jnp.zeros((1, 2, 2, 1)), padding=0)


@pytest.mark.parametrize(("H", "W"), [(4, 6), (5, 3), (1, 1)])
def test_an_average_pool_leaves_out_what_is_beyond_the_edge(H, W):
    x = np.random.default_rng(0).standard_normal((2, H, W, 3))
    wanted = [[x[:, i : i + 2, j : j + 2].mean((1, 2)) for j in range(0, W, 2)] for i in range(0, H, 2)]
    found = jax.jit(average_pool, static_argnums=1)(jnp.asarray(x, jnp.float32), 2)
    np.testing.assert_allclose(found, np.array(wanted).transpose(2, 0, 1, 3), atol=1e-6)
