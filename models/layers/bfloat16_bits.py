"""Conversions between bfloat16 and float32 by operations on integers, beside oneDNN's kernels on a CPU.

XLA:CPU converts by instructions for which LLVM does not vectorise a loop, and computes a selection between bfloat16
numbers by jumps. The results here are the same, bit for bit. In a loop on one core (AVX-512 without AMX), 131,072
values in the cache, µs with XLA's conversions / with these:

    sum of two and ReLU                      86 / 17        batch norm with ReLU, forward       59 / 44
    selection by the sign of another        534 / 21        batch norm without, forward         95 / 37
    sum of two                               64 / 13        batch norm with ReLU, backward      61 / 57

Forward and backward passes on two cores beside other work, processor time with XLA's conversions / with these: 2×2
max-pooling ×4.1, 3×3 ×4.1, two ReLUs and a fork ×2.9, GELU ×1.9, layer norm ×1.3.

With XLA's kernels, programs stay what they were.

Where other docstrings name float32 as the dtype of a computation, float64 inputs are computed and returned in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from loopfeed.models.kernels.choice import ONEDNN, kernels_in_use
from loopfeed.models.layers.platform_forms import on_platform


def to_float32(x: jax.Array) -> jax.Array:
    """Return `x` as float32; a float64 array stays float64."""
    return x.astype(wide_dtype(x))


def wide_dtype(x: jax.Array) -> DTypeLike:
    """Return float32, or float64 if that is the dtype of `x`."""
    return jnp.promote_types(jnp.result_type(x), jnp.float32)


_LOWER_HALF, _BELOW_A_TIE = np.uint32(16), np.uint32(0x7FFF)
_SIGN, _QUIET_NAN = np.uint32(0x80000000), np.uint32(0x7FC00000)


def converts_by_bits(dtype: DTypeLike) -> bool:
    """Return whether layers that are traced now convert arrays of this dtype by operations on integers on a CPU."""
    return jnp.dtype(dtype) == jnp.bfloat16 and kernels_in_use() == ONEDNN


def widen_by_bits(x: jax.Array) -> jax.Array:
    """Return what `to_float32` returns; its derivative, a rounding, converts by bits too."""
    return _widened(x) if converts_by_bits(x.dtype) else to_float32(x)


def round_by_bits(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return `x.astype(dtype)`, rounded to the nearest, ties to even; its derivative converts by bits too."""
    return _rounded(x) if x.dtype == jnp.float32 and converts_by_bits(dtype) else x.astype(dtype)


def read_twice(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `x` for each of two readers; beside oneDNN's kernels, the sum of their gradients converts by bits."""
    return _read_twice(x) if converts_by_bits(x.dtype) else (x, x)


@jax.custom_vjp
def _widened(x: jax.Array) -> jax.Array:
    return on_platform(x, cpu=_widen, default=to_float32)


@jax.custom_vjp
def _rounded(x: jax.Array) -> jax.Array:
    return on_platform(x, cpu=_round, default=_convert)


@jax.custom_vjp
def _read_twice(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, x


# The derivative of an operation on bits is zero, so that a second derivative of a layer would be lost without an error.
_widened.defvjp(lambda x: (_widened(x), None), lambda _, gradient: (_rounded(gradient),))
_rounded.defvjp(lambda x: (_rounded(x), None), lambda _, gradient: (_widened(gradient),))
_read_twice.defvjp(
    lambda x: (_read_twice(x), None), lambda _, gradients: (_rounded(_widened(gradients[0]) + _widened(gradients[1])),)
)


def _convert(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def _widen(x: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(bits << _LOWER_HALF, jnp.float32)


def _round(x: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # What carries into the upper half: more than a half, or a half where the upper half is odd.
    rounded = bits + (_BELOW_A_TIE + ((bits >> _LOWER_HALF) & np.uint32(1)))
    kept = jnp.where(jnp.isnan(x), (bits & _SIGN) | _QUIET_NAN, rounded)
    return lax.bitcast_convert_type((kept >> _LOWER_HALF).astype(jnp.uint16), jnp.bfloat16)
