"""The Gaussian error linear unit and an approximation. Derivatives are written by hand to keep only the input."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from models.kernels.choice import ONEDNN, kernels_in_use, using_kernels
from models.layers.bfloat16_bits import EXPONENT_BITS, FRACTION_BITS, converts_by_bits, round_by_bits, widen_by_bits

# Section 2 of the paper.
_SLOPE = 1.702
_NARROW_SLOPE = 1.703125  # in bfloat16


def gelu(x: jax.Array) -> jax.Array:
    """Return x·Φ(x), with Φ the normal distribution (Hendrycks and Gimpel, 2016, arXiv:1606.08415), elementwise.

    Computed in float32 with the error function, as in PyTorch, not approximated by a tanh; the dtype is that of `x`.
    """
    return _gelu(kernels_in_use(), x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gelu(kernels: str, x: jax.Array) -> jax.Array:
    with using_kernels(kernels):
        wide = widen_by_bits(x)
        return round_by_bits(wide * _distribution(wide), x.dtype)


def _distribution(x: jax.Array) -> jax.Array:
    # With erf, not erfc, which XLA:CPU computes several times more slowly.
    return 0.5 * (1.0 + lax.erf(x * math.sqrt(0.5)))


def _gelu_forward(kernels: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gelu(kernels, x), x


def _gelu_backward(kernels: str, x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    """Multiply by the derivative, Φ(x) + x·φ(x)."""
    with using_kernels(kernels):
        wide = widen_by_bits(x)
        density = jnp.exp(-0.5 * jnp.square(wide)) / math.sqrt(2.0 * math.pi)
        of_result = widen_by_bits(gradient) if converts_by_bits(x.dtype) else gradient
        return (round_by_bits((_distribution(wide) + wide * density) * of_result, x.dtype),)


_gelu.defvjp(_gelu_forward, _gelu_backward)


def approximate_gelu(x: jax.Array) -> jax.Array:
    """Return x·sigmoid(1.702·x), the approximation of GELU in the same paper, in the dtype of `x`."""
    return _approximate_by_bits(x) if converts_by_bits(x.dtype) else x * jax.nn.sigmoid(_SLOPE * x)


@jax.custom_vjp
def _approximate_by_bits(x: jax.Array) -> jax.Array:
    """Return what `approximate_gelu` returns in bfloat16: each operation rounds, here without leaving float32."""
    with using_kernels(ONEDNN):
        wide = widen_by_bits(x)
        return round_by_bits(wide * _gate(wide), x.dtype)


def _gate(wide: jax.Array) -> jax.Array:
    # XLA computes the logistic function by these operations.
    growth = _as_bfloat16(jnp.exp(-_as_bfloat16(_NARROW_SLOPE * wide)))
    return _as_bfloat16(1.0 / _as_bfloat16(1.0 + growth))


def _as_bfloat16(wide: jax.Array) -> jax.Array:
    return lax.reduce_precision(wide, EXPONENT_BITS, FRACTION_BITS)


def _approximate_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _approximate_by_bits(x), x


def _approximate_backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    """Return the gradient as jax derives it, operation by operation."""
    with using_kernels(ONEDNN):
        wide, of_result = widen_by_bits(x), widen_by_bits(gradient)
        gate = _gate(wide)
        slope = _as_bfloat16(gate * _as_bfloat16(1.0 - gate))
        of_scaled = _as_bfloat16(_as_bfloat16(wide * of_result) * slope)
        return (round_by_bits(_as_bfloat16(of_result * gate) + _as_bfloat16(_NARROW_SLOPE * of_scaled), x.dtype),)


_approximate_by_bits.defvjp(_approximate_forward, _approximate_backward)
