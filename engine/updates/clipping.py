"""The global norm of a gradient, and clipping to a maximum norm or value.

The same as in optax, but only for real numbers: optax also computes imaginary parts, which takes half of the time to
trace an update.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from loopfeed.models.layers.to_float32 import to_float32


def global_norm(tree: Any) -> Float[Array, ""]:
    """Return the Euclidean norm over all leaves of a pytree of real arrays, in float32; 0 if it has no leaves."""
    squares = [jnp.sum(jax.lax.square(to_float32(leaf))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def norm_of_order(tree: Any, order: float) -> Float[Array, ""]:
    """Return the p-norm over all leaves of a pytree of real arrays, in float32; 0 if it has no leaves.

    As the total norm of PyTorch's `clip_grad_norm_`. The numbers are divided by the largest, so that no power
    overflows.

    Args:
        tree: the arrays.
        order: p, at least 1; inf is the largest magnitude. Static.
    """
    if order == 2:
        return global_norm(tree)
    magnitudes = [jnp.abs(to_float32(leaf)) for leaf in jax.tree.leaves(tree) if leaf.size]
    largest = jnp.max(jnp.stack([jnp.max(each) for each in magnitudes])) if magnitudes else jnp.zeros((), jnp.float32)
    if math.isinf(order):
        return largest
    scale = jnp.where(largest > 0, largest, 1)
    total = sum((jnp.sum((each / scale) ** order) for each in magnitudes), start=jnp.zeros((), jnp.float32))
    return scale * total ** (1 / order)


def clip_by_global_norm(largest: jax.typing.ArrayLike, order: float = 2) -> optax.GradientTransformation:
    """Return a transformation that scales float32 gradients to a global norm of at most `largest`.

    If `largest` is inf, nothing is clipped. `order` is that of `norm_of_order`.
    """

    def clip(updates: Any, _: Any) -> Any:
        norm = norm_of_order(updates, order)
        fits = norm < largest
        return jax.tree.map(
            lambda leaf: jax.lax.select(fits, leaf, (leaf / norm * largest).astype(leaf.dtype)), updates
        )

    return optax.stateless(clip)


def clip_gradient(
    largest_norm: jax.typing.ArrayLike, order: float = 2, largest_value: jax.typing.ArrayLike | None = None
) -> optax.GradientTransformation:
    """Return a transformation that clips the value of each element, and then the global norm.

    Args:
        largest_norm, order: as `clip_by_global_norm` takes them.
        largest_value: the largest magnitude of an element; None compiles no clipping of values.
    """
    by_norm = clip_by_global_norm(largest_norm, order)
    if largest_value is None:
        return by_norm

    def clip(updates: Any, params: Any) -> Any:
        updates = jax.tree.map(lambda leaf: jnp.clip(leaf, jnp.negative(largest_value), largest_value), updates)
        return by_norm.update(updates, optax.EmptyState(), params)[0]

    return optax.stateless(clip)
