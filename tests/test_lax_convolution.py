"""The drop-in for `lax.conv_general_dilated`: equal to it for every call, loop-safe where it can be."""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopfeed import conv_general_dilated

NHWC = ("NHWC", "HWIO", "NHWC")


def drawn(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Draw by NumPy: what jax draws would be compiled by every process that collects the tests."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


X = drawn(0, (2, 7, 6, 4))
KERNEL = drawn(1, (3, 3, 4, 5))
HALVES = {"lhs": drawn(0, X.shape, jnp.bfloat16), "rhs": drawn(1, KERNEL.shape, jnp.bfloat16)}


@pytest.mark.parametrize(
    ("strides", "padding"),
    [((1, 1), "SAME"), ((2, 1), "VALID"), ((2, 2), ((1, 0), (2, 1))), ((1, 2), [(0, 0), (1, 1)]), ((1, 1), "same")],
)
def test_the_calls_of_flax_are_loop_safe_and_equal_lax(strides, padding):
    numbers = lax.conv_dimension_numbers(X.shape, KERNEL.shape, NHWC)
    keywords = {"lhs_dilation": (1, 1), "rhs_dilation": (1, 1), "dimension_numbers": numbers, "precision": None}

    def run(convolve, x, kernel):
        return convolve(x, kernel, strides, padding, feature_group_count=1, **keywords)

    @partial(jax.jit, static_argnums=0)
    def value_and_gradients(convolve, x, kernel):
        value, pullback = jax.vjp(partial(run, convolve), x, kernel)
        return value, pullback(2 * value)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, gradients = value_and_gradients(conv_general_dilated, X, KERNEL)
    assert "custom_vjp_call" in str(jax.make_jaxpr(lambda x: run(conv_general_dilated, x, KERNEL))(X))
    expected, references = value_and_gradients(lax.conv_general_dilated, X, KERNEL)
    # The sums are of 36 products each, in another order.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for mine, reference in zip(gradients, references, strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rhs_dilation": (2, 2)}, "dilation"),
        ({"lhs_dilation": (2, 1), "padding": ((0, 0), (1, 1))}, "dilation"),
        ({"batch_group_count": 2, "rhs": drawn(1, (3, 3, 4, 6))}, "2 groups of images"),
        ({"padding": ((-1, 0), (0, 0))}, "negative padding"),
        ({"precision": lax.Precision.HIGHEST}, "the precision HIGHEST"),
        (HALVES | {"preferred_element_type": jnp.float32}, "a preferred element type or sharding"),
        ({"lhs": drawn(0, (2, 4, 7, 6)), "dimension_numbers": ("NCHW", "HWIO", "NCHW")}, "the dimension numbers"),
        (
            {"lhs": drawn(0, (2, 9, 4)), "rhs": drawn(1, (3, 4, 5)), "window_strides": (1,)}
            | {"dimension_numbers": ("NHC", "HIO", "NHC")},
            "1 spatial dimension",
        ),
    ],
)
def test_any_other_call_is_that_of_lax_and_says_why(change, reason):
    call = {"lhs": X, "rhs": KERNEL, "window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC} | change
    with pytest.warns(RuntimeWarning, match=f"a convolution with {reason}.* runs as XLA's own, which is many times"):
        found = conv_general_dilated(**call)
    expected = lax.conv_general_dilated(**call)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
