"""Layer norm, GELU, attention and dense layers over tokens: extreme values, precision of the operands, gradients."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopfeed.models.families.vision_transformer import self_attention
from loopfeed.models.kernels import ONEDNN, XLA, using_kernels
from loopfeed.models.layers.gelu import gelu, quick_gelu
from loopfeed.models.layers.head import linear
from loopfeed.models.layers.layer_norm import layer_norm
from tests.block_references import gelu as numpy_gelu
from tests.block_references import norm as numpy_norm
from tests.kernels import needs_onednn
from tests.test_precision import operations

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("llvms_optimiser")]


def normal(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [
        ("float32", XLA),
        pytest.param("float32", ONEDNN, marks=needs_onednn),
        pytest.param("bfloat16", ONEDNN, marks=needs_onednn),
    ],
)
def test_quick_gelu_and_its_gradient_are_rounded_once(dtype, kernels):
    x = jnp.asarray(np.linspace(-12, 12, 2001), dtype)
    exact = np.asarray(x, np.float64)
    share = 1 / (1 + np.exp(-1.702 * exact))
    with using_kernels(kernels):
        y, pullback = jax.vjp(quick_gelu, x)
        (gradient,) = pullback(jnp.full_like(x, 0.75))
    assert y.dtype == gradient.dtype == x.dtype
    # Half the distance of neighbouring numbers of bfloat16, beside that of float32's exponential.
    rounding = 2.0**-8 if dtype == "bfloat16" else 0
    np.testing.assert_allclose(np.asarray(y, np.float64), exact * share, rtol=rounding * 1.01, atol=4e-6)
    derivative = 0.75 * (share + 1.702 * exact * share * (1 - share))
    np.testing.assert_allclose(np.asarray(gradient, np.float64), derivative, rtol=rounding * 1.01, atol=4e-6)


def test_gelu_is_exact_from_end_to_end():
    x = np.linspace(-12, 12, 2001, dtype=np.float32)
    # 1 + erf has an absolute error of about 1e-7, which is multiplied by x.
    np.testing.assert_allclose(gelu(jnp.asarray(x)), numpy_gelu(x.astype(np.float64)), rtol=0, atol=2e-6)
    step = 1e-5
    wanted = (numpy_gelu(x.astype(np.float64) + step) - numpy_gelu(x.astype(np.float64) - step)) / (2 * step)
    np.testing.assert_allclose(jax.vmap(jax.grad(gelu))(x), wanted, rtol=0, atol=2e-6)
    # A tanh would be 4e-4 off here.
    assert abs(float(gelu(jnp.float32(-2))) + 2 * 0.5 * math.erfc(math.sqrt(2))) < 1e-7


def test_a_norm_of_values_far_from_zero_keeps_their_differences():
    x, (scale, bias) = 1000 + normal(0, (4, 5, 32)), normal(1, (2, 32))
    # At 1000 float32 has a spacing of 6e-5, against which differences of 1 are normalised.
    np.testing.assert_allclose(layer_norm(x, scale, bias), numpy_norm(x.astype(np.float64), scale, bias), atol=5e-4)
    constant = jnp.full((2, 8), 7.0)
    np.testing.assert_array_equal(layer_norm(constant, jnp.ones(8), jnp.full(8, 3.0)), 3)


def test_the_gradients_of_a_norm_are_jaxs_own():
    shape = 2, 3, 7
    x, g, (scale, bias) = normal(0, shape), normal(1, shape), normal(2, (2, 7))

    def plain(x, scale, bias):
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * scale + bias

    found, wanted = (
        jax.jit(jax.grad(lambda *args, form=form: (form(*args) * g).sum(), (0, 1, 2)))(x, scale, bias)
        for form in (layer_norm, plain)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, wanted)


def plain_attention(qkv, num_heads):
    B, N, width = qkv.shape
    q, k, v = jnp.moveaxis(qkv.reshape(B, N, 3, num_heads, width // 3 // num_heads), 2, 0)
    weights = jax.nn.softmax(jnp.einsum("bnhd,bmhd->bhnm", q, k) / np.sqrt(q.shape[-1]), axis=-1)
    return jnp.einsum("bhnm,bmhd->bnhd", weights, v).reshape(B, N, -1)


def test_attention_and_its_gradient_are_those_of_the_plain_formula():
    qkv, g = normal(0, (2, 7, 3 * 12)), normal(1, (2, 7, 12))
    found, wanted = (
        jax.jit(jax.value_and_grad(lambda qkv, form=form: (form(qkv, 3) * g).sum()))(qkv)
        for form in (self_attention, plain_attention)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, wanted)


def test_attention_with_huge_scores_chooses_one_token():
    qkv = jnp.concatenate([jnp.full((1, 3, 4), 1e10), jnp.eye(3, 4)[None] * 1e10, normal(0, (1, 3, 4))], axis=-1)
    attended, gradient = jax.jit(jax.value_and_grad(lambda qkv: self_attention(qkv, 1).sum()))(qkv)
    assert jnp.isfinite(attended)
    assert jnp.isfinite(gradient).all()


def test_products_in_bfloat16_have_narrow_operands_and_wide_sums():
    def loss(qkv, kernel):
        y = linear(self_attention(linear(qkv, kernel, jnp.zeros(12)), 2), kernel[:4, :4], jnp.zeros(4))
        return y.astype(jnp.float32).sum()

    shapes = jax.ShapeDtypeStruct((2, 5, 4), jnp.bfloat16), jax.ShapeDtypeStruct((4, 12), jnp.float32)
    found = [
        each
        for each in operations(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*shapes).jaxpr, "cuda")
        if each.primitive.name == "dot_general"
    ]
    assert found
    assert {operand.aval.dtype for each in found for operand in each.invars} == {jnp.dtype(jnp.bfloat16)}
    assert {each.outvars[0].aval.dtype for each in found} == {jnp.dtype(jnp.float32)}
