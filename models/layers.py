"""What the networks need besides convolutions: batch norm, pooling, a dense layer. Pure functions of arrays."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MOMENTUM = 0.1
EPSILON = 1e-5
PLACES = (0, 1, 2)


class RunningStats(NamedTuple):
    """Exponential averages of a channel's mean and unbiased variance, float32 `[C]` each."""

    mean: jax.Array
    var: jax.Array


def batch_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, running: RunningStats, *, train: bool
) -> tuple[jax.Array, RunningStats]:
    """Normalise every channel over images and places (Ioffe and Szegedy, 2015), as PyTorch does it.

    Args:
        x: `[B,H,W,C]`, any floating dtype; statistics are float32.
        scale: `[C]` float32.
        bias: `[C]` float32.
        running: used when not training; in training moved by a tenth towards the batch's mean and unbiased variance.
        train: whether to normalise by the batch's own mean and biased variance.

    Returns:
        `[B,H,W,C]` in the dtype of `x`, and the running statistics, through which no gradient flows.
    """
    if not train:
        centred = x.astype(jnp.float32) - running.mean
        return (centred * (scale * jax.lax.rsqrt(running.var + EPSILON)) + bias).astype(x.dtype), running
    y, mean, var = _normalise(x, scale, bias)
    count = x.size // x.shape[3]
    unbiased = var * (count / max(count - 1, 1))
    moved = RunningStats(
        (1 - MOMENTUM) * running.mean + MOMENTUM * mean, (1 - MOMENTUM) * running.var + MOMENTUM * unbiased
    )
    return y, jax.lax.stop_gradient(moved)


@jax.custom_vjp
def _normalise(x: jax.Array, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalised `x`, and the batch's mean and biased variance in float32.

    The variance is that of the centred values: E[x²] - E[x]² loses all digits where the mean is large. The backward
    pass is written out so that only `x` is kept; derived automatically it kept two more arrays of its size.
    """
    wide = x.astype(jnp.float32)
    mean = wide.mean(PLACES)
    centred = wide - mean
    var = jnp.square(centred).mean(PLACES)
    # Centred first, here and in the backward pass: folded into one multiplication and addition, the two large terms
    # cancel, and the losses of a 12-step run were 3e-4 off those in float64 where this form is 1e-7 off.
    return (centred * (scale * jax.lax.rsqrt(var + EPSILON)) + bias).astype(x.dtype), mean, var


def _normalise_forward(
    x: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, ...]]:
    y, mean, var = _normalise(x, scale, bias)
    return (y, mean, var), (x, scale, mean, var)


def _normalise_backward(
    residuals: tuple[jax.Array, ...], gradients: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """With x̂ normalised and g the gradient of y: σ·dx = scale·(g - mean g - x̂·mean(g·x̂)).

    The gradients of mean and variance are none: they reach nothing but the running statistics.
    """
    x, scale, mean, var = residuals
    centred, gradient = x.astype(jnp.float32) - mean, gradients[0].astype(jnp.float32)
    inverse = jax.lax.rsqrt(var + EPSILON)
    count = x.size // x.shape[3]
    of_bias = gradient.sum(PLACES)
    of_scale = (gradient * centred).sum(PLACES) * inverse
    of_x = (scale * inverse) * (gradient - centred * (of_scale * inverse / count) - of_bias / count)
    return of_x.astype(x.dtype), of_scale, of_bias


_normalise.defvjp(_normalise_forward, _normalise_backward)


def global_average_pool(x: jax.Array) -> jax.Array:
    """Mean over places: `x [B,H,W,C]` to `[B,C]`, added up in float32, in the dtype of `x`."""
    return x.astype(jnp.float32).mean(axis=(1, 2)).astype(x.dtype)


def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Affine map of `x [B,C]` by `kernel [C,K]` and `bias [K]`: float32 `[B,K]`, whatever the operands' dtypes.

    The operands of all three products, forward and backward, are rounded to the dtype of `x`; sums are float32, and so
    are the gradients by `kernel` and `bias` where these are. It has its own derivative, as `convolution` has.
    """
    return _product(x, kernel) + bias


@jax.custom_vjp
def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x [B,C] @ kernel [C,K]` in float32. Derived automatically, the backward products have float32 operands."""
    return _contract(x, kernel.astype(x.dtype), 1, 0)


def _contract(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    return jax.lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _product_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, kernel), (x, kernel)


def _product_backward(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    gradient = gradient.astype(x.dtype)
    of_x = _contract(gradient, kernel.astype(x.dtype), 1, 1)
    return of_x.astype(x.dtype), _contract(x, gradient, 0, 0).astype(kernel.dtype)


_product.defvjp(_product_forward, _product_backward)
