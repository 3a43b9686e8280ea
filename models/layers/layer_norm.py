"""Layer norm over the last axis. The derivative is written by hand so that only the input is kept for it."""

import jax
import jax.numpy as jnp
from jax import lax

from models.layers.widening import widen

EPSILON = 1e-6
"""Added to the variance in timm's vision transformers and ConvNeXts."""


def init_layer_norm(C: int) -> dict[str, jax.Array]:
    """Return initial parameters `[C]` of a layer norm: scale 1, bias 0."""
    return {"scale": jnp.ones(C, jnp.float32), "bias": jnp.zeros(C, jnp.float32)}


@jax.custom_vjp
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Normalise each vector along the last axis to mean 0 and variance 1 (Ba et al., 2016, arXiv:1607.06450).

    Args:
        x: `[...,C]`, any floating dtype; mean and biased variance are float32.
        scale, bias: `[C]` float32, applied to the normalised vector.

    Returns:
        `[...,C]` in the dtype of `x`.
    """
    normal, _ = _normalise(x)
    return (normal * scale + bias).astype(x.dtype)


def _normalise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the normalised vectors and the factor by which each was divided, 1/√(variance + ε), in float32."""
    wide = widen(x)
    centred = wide - wide.mean(-1, keepdims=True)
    inverse = lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + EPSILON)
    return centred * inverse, inverse


def _layer_norm_forward(
    x: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return layer_norm(x, scale, bias), (x, scale)


def _layer_norm_backward(
    residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients. With x̂ normalised and h = scale·g: σ·dx = h - mean h - x̂·mean(h·x̂)."""
    x, scale = residuals
    normal, inverse = _normalise(x)
    wide = gradient.astype(normal.dtype)
    scaled = wide * scale
    shift, slope = scaled.mean(-1, keepdims=True), (scaled * normal).mean(-1, keepdims=True)
    over_vectors = tuple(range(x.ndim - 1))
    return (
        (inverse * (scaled - shift - normal * slope)).astype(x.dtype),
        (wide * normal).sum(over_vectors),
        wide.sum(over_vectors),
    )


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)
