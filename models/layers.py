"""What a residual network needs besides convolutions: batch norm, pooling, a dense layer. Pure functions of arrays."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MOMENTUM = 0.1
EPSILON = 1e-5


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
        `[B,H,W,C]` in the dtype of `x`, and the running statistics.
    """
    if not train:
        factor = scale * jax.lax.rsqrt(running.var + EPSILON)
        return (x * factor + (bias - running.mean * factor)).astype(x.dtype), running
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=(0, 1, 2))
    var = jnp.square(wide - mean).mean(axis=(0, 1, 2))
    y = (wide - mean) * (scale * jax.lax.rsqrt(var + EPSILON)) + bias
    count = x.size // x.shape[3]
    unbiased = var * (count / max(count - 1, 1))
    moved = RunningStats(
        (1 - MOMENTUM) * running.mean + MOMENTUM * mean, (1 - MOMENTUM) * running.var + MOMENTUM * unbiased
    )
    return y.astype(x.dtype), jax.lax.stop_gradient(moved)


def global_average_pool(x: jax.Array) -> jax.Array:
    """Mean over places: `x [B,H,W,C]` to `[B,C]`, added up in float32, in the dtype of `x`."""
    return x.astype(jnp.float32).mean(axis=(1, 2)).astype(x.dtype)


def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Affine map of `x [B,C]` by `kernel [C,K]` and `bias [K]`: float32 `[B,K]`, whatever the operands' dtypes."""
    return jnp.dot(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32) + bias
