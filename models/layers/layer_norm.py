"""Layer norm over the last axis. The derivative is written by hand so that only the input is kept for it."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from loopfeed.models.kernels.choice import kernels_in_use, using_kernels
from loopfeed.models.layers.bfloat16_bits import round_by_bits, widen_by_bits

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
