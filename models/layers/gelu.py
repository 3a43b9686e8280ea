"""The Gaussian error linear unit, exact and approximated.

Derivatives are written by hand so that only the input is kept for them, that of the approximation only in bfloat16
beside oneDNN's kernels.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from loopfeed.models.kernels.choice import ONEDNN, kernels_in_use, using_kernels
from loopfeed.models.layers.bfloat16_bits import converts_by_bits, round_by_bits, widen_by_bits

# x·sigmoid(1.702·x) approximates GELU (Hendrycks and Gimpel, 2016, arXiv:1606.08415, section 2).
_SIGMOID_SLOPE = 1.702
_LARGEST = float(jnp.finfo(jnp.float32).max)


def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
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


def quick_gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return x·sigmoid(1.702·x), an approximation of GELU, elementwise, in the dtype of `x`.

    In bfloat16 each operation is rounded; beside oneDNN's kernels it is computed in float32 and rounded once.
    """
    return _quick_gelu(x) if converts_by_bits(x.dtype) else x * jax.nn.sigmoid(_SIGMOID_SLOPE * x)


@jax.custom_vjp
def _quick_gelu(x: jax.Array) -> jax.Array:
    with using_kernels(ONEDNN):
        wide = widen_by_bits(x)
        return round_by_bits(wide * jax.nn.sigmoid(_SIGMOID_SLOPE * wide), x.dtype)


def _quick_gelu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _quick_gelu(x), x


def _quick_gelu_backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    """Multiply by the derivative, s + 1.702·x·s·(1 - s) with s = sigmoid(1.702·x)."""
    with using_kernels(ONEDNN):
        # Finite where the product would overflow, because infinity times a share of 0 is NaN.
        scaled = jnp.clip(_SIGMOID_SLOPE * widen_by_bits(x), -_LARGEST, _LARGEST)
        share = jax.nn.sigmoid(scaled)
        derivative = share * (1.0 + scaled * (1.0 - share))
        return (round_by_bits(derivative * widen_by_bits(gradient), x.dtype),)


_quick_gelu.defvjp(_quick_gelu_forward, _quick_gelu_backward)
