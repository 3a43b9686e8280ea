"""The activations of mobile networks, elementwise. Derivatives are written by hand so that only the input is kept.

On a CPU the result is stored in memory: a depthwise convolution reads each value up to 25 times, and XLA would compute
it again for each.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loopfeed.models.kernels.choice import kernels_in_use, using_kernels
from loopfeed.models.layers.bfloat16_bits import round_by_bits, widen_by_bits
from loopfeed.models.layers.platform_forms import materialize

type _Elementwise = Callable[[jax.Array], jax.Array]


def silu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return x·sigmoid(x) (SiLU, swish; Ramachandran et al., 2017, arXiv:1710.05941) in the dtype of `x`."""
    return _activate(kernels_in_use(), _silu, _silu_slope, x)


def relu6(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return `x` clipped to 0 … 6 in the dtype of `x`; the derivative at both ends is 0, as in PyTorch."""
    return _activate(kernels_in_use(), _relu6, _relu6_slope, x)


def hard_silu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return x·clip(x + 3, 0, 6)/6 (hard-swish; Howard et al., 2019, arXiv:1905.02244) in the dtype of `x`."""
    return _activate(kernels_in_use(), _hard_silu, _hard_silu_slope, x)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _activate(kernels: str, value: _Elementwise, _slope: _Elementwise, x: jax.Array) -> jax.Array:
    """Return `value(x)`, computed in float32 and stored; its derivative is `_slope(x)`."""
    with using_kernels(kernels):
        stored: jax.Array = materialize(round_by_bits(value(widen_by_bits(x)), x.dtype))
        return stored


def _forward(kernels: str, value: _Elementwise, slope: _Elementwise, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _activate(kernels, value, slope, x), x


def _backward(
    kernels: str, _value: _Elementwise, slope: _Elementwise, x: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
    with using_kernels(kernels):
        found: jax.Array = materialize(round_by_bits(slope(widen_by_bits(x)) * widen_by_bits(gradient), x.dtype))
        return (found,)


_activate.defvjp(_forward, _backward)


def _silu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


def _silu_slope(x: jax.Array) -> jax.Array:
    share = jax.nn.sigmoid(x)
    return share + x * share * (1.0 - share)


def _relu6(x: jax.Array) -> jax.Array:
    return jnp.clip(x, 0.0, 6.0)


def _relu6_slope(x: jax.Array) -> jax.Array:
    return ((x > 0.0) & (x < 6.0)).astype(x.dtype)


def _hard_silu(x: jax.Array) -> jax.Array:
    return x * (jnp.clip(x + 3.0, 0.0, 6.0) / 6.0)


def _hard_silu_slope(x: jax.Array) -> jax.Array:
    return jnp.where(x >= 3.0, 1.0, jnp.where(x <= -3.0, 0.0, x / 3.0 + 0.5))
