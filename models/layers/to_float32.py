"""Conversion to at least float32, for sums and statistics that a narrower dtype would round away.

Where other docstrings name float32 as the dtype of a computation, float64 inputs are computed and returned in float64.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def to_float32(x: jax.Array) -> jax.Array:
    """Return `x` as float32; a float64 array stays float64."""
    return x.astype(wide_dtype(x))


def wide_dtype(x: jax.Array) -> DTypeLike:
    """Return float32, or float64 if that is the dtype of `x`."""
    return jnp.promote_types(jnp.result_type(x), jnp.float32)
