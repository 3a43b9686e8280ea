"""The precision of an adapted model: bfloat16 or float32 arithmetic on weights that are stored in float32."""

from typing import Any

import jax
import jax.numpy as jnp

_PRECISIONS = ("float32", "bfloat16")


def check_precision(precision: str) -> Any:
    """Return the dtype of a precision.

    Raises:
        ValueError: if it is neither float32 nor bfloat16.
    """
    if precision not in _PRECISIONS:
        raise ValueError(f"precision must be {' or '.join(_PRECISIONS)}, got {precision!r}: choose one of them")
    return jnp.dtype(precision)


def cast_floats(tree: Any, dtype: Any) -> Any:
    """Cast the floating-point leaves of a pytree to `dtype`; other leaves stay as they are."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


def cast_like(tree: Any, like: Any) -> Any:
    """Cast each leaf of a pytree to the dtype of the corresponding leaf of `like`."""
    return jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), tree, like)
