"""Self-attention of several heads, as batched matrix products with float32 sums and softmax."""

import math

import jax

from models.layers.widening import wide_dtype


def self_attention(qkv: jax.Array, num_heads: int) -> jax.Array:
    """Return softmax(Q·Kᵀ/√d)·V of each head (Vaswani et al., 2017, arXiv:1706.03762), joined along the last axis.

    Args:
        qkv: `[B,N,3·C]`, the queries, keys and values of N tokens; in each, the heads follow one another with
            d = C / num_heads channels, as in timm.
        num_heads: number of heads, a divisor of C.

    Returns:
        `[B,N,C]` in the dtype of `qkv`. The operands of all products, forward and backward, have that dtype; their sums
        and the softmax are float32.
    """
    B, N, width = qkv.shape
    d = width // (3 * num_heads)
    # Batch and heads as the only batch axis, in front: the form of a product that XLA:CPU passes to its fast kernels.
    apart = qkv.reshape(B, N, 3, num_heads, d).transpose(2, 0, 3, 1, 4).reshape(3, B * num_heads, N, d)
    heads = _attend(apart[0], apart[1], apart[2])
    return heads.reshape(B, num_heads, N, d).transpose(0, 2, 1, 3).reshape(B, N, num_heads * d)


def _product(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """Sum over an axis of `x` and one of `y`, for each element of the first axis of both; in float32 or wider."""
    wide = wide_dtype(x)
    return jax.lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((0,), (0,))), preferred_element_type=wide)


@jax.custom_vjp
def _attend(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Return the attention `[M,N,d]` of queries, keys and values `[M,N,d]`.

    It has a custom derivative, because an automatic derivative would multiply float32 operands.
    """
    weights = _weights(queries, keys)
    return _product(weights, values, 2, 1).astype(values.dtype)


def _weights(queries: jax.Array, keys: jax.Array) -> jax.Array:
    scores = _product(queries, keys, 2, 2) * (1.0 / math.sqrt(queries.shape[2]))
    return jax.nn.softmax(scores, axis=-1).astype(queries.dtype)


def _attend_forward(queries: jax.Array, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    weights = _weights(queries, keys)
    attended = _product(weights, values, 2, 1).astype(values.dtype)
    return attended, (queries, keys, values, weights, attended)


def _attend_backward(residuals: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of queries, keys and values.

    With P the softmax of the scores S and O = P·V: dS = P ∘ (dP - rowsum(P ∘ dP)). The row sums are those of O ∘ dO.
    """
    queries, keys, values, weights, attended = residuals
    dtype = queries.dtype
    weights_gradient = _product(gradient, values, 2, 2)
    wide = weights_gradient.dtype
    sums = (attended.astype(wide) * gradient.astype(wide)).sum(-1, keepdims=True)
    scores_gradient = weights.astype(wide) * (weights_gradient - sums) * (1.0 / math.sqrt(queries.shape[2]))
    scores_gradient = scores_gradient.astype(dtype)
    return (
        _product(scores_gradient, keys, 2, 1).astype(dtype),
        _product(scores_gradient, queries, 1, 1).astype(dtype),
        _product(weights, gradient, 1, 1).astype(dtype),
    )


_attend.defvjp(_attend_forward, _attend_backward)
