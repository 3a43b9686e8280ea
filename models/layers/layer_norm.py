"""Layer norm over the last axis. The derivative is written by hand so that only the input is kept for it.

And the Gaussian error linear unit, exact and approximated. Its derivatives are written by hand so that only the input
is kept for them, that of the approximation only in bfloat16 beside oneDNN's kernels.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

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


EPSILON = 1e-6
"""Added to the variance in timm's vision transformers and ConvNeXts."""


def init_layer_norm(C: int) -> dict[str, Float32[Array, "{C}"]]:
    """Return initial parameters of a layer norm: scale 1, bias 0."""
    return {"scale": jnp.ones(C, jnp.float32), "bias": jnp.zeros(C, jnp.float32)}


def layer_norm(
    x: Float[Array, "*batch C"], scale: Float32[Array, "C"], bias: Float32[Array, "C"]
) -> Float[Array, "*batch C"]:
    """Normalise each vector along the last axis to mean 0 and variance 1 (Ba et al., 2016, arXiv:1607.06450).

    Args:
        x: of any floating dtype, as is the result; mean and biased variance are float32.
        scale, bias: applied to the normalised vector.
    """
    return _layer_norm(kernels_in_use(), x, scale, bias)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_norm(kernels: str, x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    with using_kernels(kernels):
        normal, _ = _normalise(x)
        return round_by_bits(normal * scale + bias, x.dtype)


def _normalise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the normalised vectors and the factor by which each was divided, 1/√(variance + ε), in float32."""
    wide = widen_by_bits(x)
    centred = wide - wide.mean(-1, keepdims=True)
    inverse = lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + EPSILON)
    return centred * inverse, inverse


def _layer_norm_forward(
    kernels: str, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _layer_norm(kernels, x, scale, bias), (x, scale)


def _layer_norm_backward(
    kernels: str, residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    with using_kernels(kernels):
        return _gradients(*residuals, gradient)


def _gradients(x: jax.Array, scale: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients. With x̂ normalised and h = scale·g: σ·dx = h - mean h - x̂·mean(h·x̂)."""
    normal, inverse = _normalise(x)
    wide = widen_by_bits(gradient)
    scaled = wide * scale
    shift, slope = scaled.mean(-1, keepdims=True), (scaled * normal).mean(-1, keepdims=True)
    over_vectors = tuple(range(x.ndim - 1))
    return (
        round_by_bits(inverse * (scaled - shift - normal * slope), x.dtype),
        (wide * normal).sum(over_vectors),
        wide.sum(over_vectors),
    )


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)
