"""Self-attention of several heads, as batched matrix products with float32 sums and softmax."""

import math
from functools import partial

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loopfeed.models.kernels.choice import XLA, kernels_in_use, using_kernels
from loopfeed.models.layers import onednn_product
from loopfeed.models.layers.bfloat16_bits import round_by_bits, widen_by_bits
from loopfeed.models.layers.platform_forms import on_platform, with_derivative_of
from loopfeed.models.layers.to_float32 import wide_dtype


def self_attention(qkv: Float[Array, "B N width"], num_heads: int) -> Float[Array, "B N width//3"]:
    """Return softmax(Q·Kᵀ/√d)·V of each head (Vaswani et al., 2017, arXiv:1706.03762), joined along the last axis.

    Args:
        qkv: the queries, keys and values of N tokens with C = width / 3 channels each; in each, the heads follow one
            another with d = C / num_heads channels, as in timm.
        num_heads: number of heads, a divisor of C.

    Returns:
        The attention in the dtype of `qkv`. The operands of all products, forward and backward, have that dtype; their
        sums and the softmax are float32.
    """
    B, N, width = qkv.shape
    d = width // (3 * num_heads)
    # Batch and heads as the only batch axis, in front: the form of a product that XLA:CPU passes to its fast kernels.
    apart = qkv.reshape(B, N, 3, num_heads, d).transpose(2, 0, 3, 1, 4).reshape(3, B * num_heads, N, d)
    heads = _attend(kernels_in_use(), apart[0], apart[1], apart[2])
    return heads.reshape(B, num_heads, N, d).transpose(0, 2, 1, 3).reshape(B, N, num_heads * d)


def _product(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int, dtype: DTypeLike | None = None) -> jax.Array:
    """Sum over an axis of `x` and one of `y`, for each element of the first axis of both.

    Sums are float32 or wider, and rounded to `dtype` at the end, if one is given.
    """
    form = partial(_sums, x_axis=x_axis, y_axis=y_axis, dtype=dtype or wide_dtype(x))
    if kernels_in_use() == XLA or not onednn_product.has_faster_batch(x, x_axis):
        return form(x, y)
    kernel = partial(onednn_product.batch, x_axis=x_axis, y_axis=y_axis, dtype=dtype or wide_dtype(x))
    return on_platform(x, y, cpu=partial(with_derivative_of, form, kernel), default=form)


def _sums(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int, dtype: DTypeLike) -> jax.Array:
    sums = jax.lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((0,), (0,))), preferred_element_type=wide_dtype(x))
    return round_by_bits(sums, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    kernels: str, queries: Float[Array, "M N d"], keys: Float[Array, "M N d"], values: Float[Array, "M N d"]
) -> Float[Array, "M N d"]:
    """Return the attention of queries, keys and values.

    It has a custom derivative, because an automatic derivative would multiply float32 operands.
    """
    with using_kernels(kernels):
        return _product(_weights(queries, keys), values, 2, 1, values.dtype)


def _weights(queries: jax.Array, keys: jax.Array) -> jax.Array:
    scores = _product(queries, keys, 2, 2) * (1.0 / math.sqrt(queries.shape[2]))
    return round_by_bits(jax.nn.softmax(scores, axis=-1), queries.dtype)


def _attend_forward(
    kernels: str, queries: jax.Array, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    with using_kernels(kernels):
        weights = _weights(queries, keys)
        attended = _product(weights, values, 2, 1, values.dtype)
    return attended, (queries, keys, values, weights, attended)


def _attend_backward(
    kernels: str, residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    with using_kernels(kernels):
        return _gradients(residuals, gradient)


def _gradients(residuals: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of queries, keys and values.

    With P the softmax of the scores S and O = P·V: dS = P ∘ (dP - rowsum(P ∘ dP)). The row sums are those of O ∘ dO.
    """
    queries, keys, values, weights, attended = residuals
    dtype = queries.dtype
    weights_gradient = _product(gradient, values, 2, 2)
    sums = (widen_by_bits(attended) * widen_by_bits(gradient)).sum(-1, keepdims=True)
    scores_gradient = widen_by_bits(weights) * (weights_gradient - sums) * (1.0 / math.sqrt(queries.shape[2]))
    scores_gradient = round_by_bits(scores_gradient, dtype)
    return (
        _product(scores_gradient, keys, 2, 1, dtype),
        _product(scores_gradient, queries, 1, 1, dtype),
        _product(weights, gradient, 1, 1, dtype),
    )


_attend.defvjp(_attend_forward, _attend_backward)
