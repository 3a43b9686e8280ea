"""Clipping of gradients, and skipping of updates that would make weights NaN or infinite.

`optax.apply_if_finite` applies such an update after too many were skipped in a row. Here none is ever applied, and too
many skips in a row end the loop. optax also computes the imaginary parts of norms, which takes half of the time to
trace an update; these are for real numbers alone.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int32

from loopfeed.engine.keys import is_key
from loopfeed.models.layers.bfloat16_bits import to_float32
from loopfeed.models.layers.platform_forms import materialize


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


class Skips(NamedTuple):
    """Counts of skipped updates.

    Attributes:
        total: skipped in the run so far.
        in_a_row: skipped since the last update that was made.
    """

    total: Int32[Array, ""]
    in_a_row: Int32[Array, ""]


def init_skips() -> Skips:
    """Return the counts before the first update: zeros."""
    return Skips(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def count_skips(skips: Skips, due: Bool[Array, ""], finite: Bool[Array, ""]) -> Skips:
    """Return the counts after one batch.

    Args:
        skips: the counts before the batch.
        due: whether an update is due.
        finite: whether its gradient is finite, and all that it makes of finite numbers.
    """
    skipped, applied = due & ~finite, due & finite
    more = skipped.astype(jnp.int32)
    return Skips(skips.total + more, jnp.where(applied, 0, skips.in_a_row + more))


def gives_up(skips: Skips, most_in_a_row: Int32[Array, ""]) -> Bool[Array, ""]:
    """Return whether more than `most_in_a_row`, a runtime value, updates in a row were skipped."""
    return skips.in_a_row > most_in_a_row


def has_finite_norm(tree: Any) -> Bool[Array, ""]:
    """Return whether the global norm of a pytree of float leaves is finite in float32.

    Clipping computes this norm anyway, and it checks all leaves in one pass. A norm above 1.8e19, whose square
    overflows float32, counts as infinite: clipping could not scale such a gradient either.
    """
    return jnp.isfinite(global_norm(tree))


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Return whether every number in a pytree of arrays is finite; true if there are no leaves.

    PRNG keys are no numbers.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not is_key(leaf)]
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]
    # Stored, because XLA would fuse the conjunction of all leaves with each select that reads it, which was two fifths
    # of the program of ResNet-50.
    found: jax.Array = materialize(jnp.all(jnp.stack(finite))) if finite else jnp.ones((), jnp.bool)
    return found


def choose(condition: Bool[Array, ""], tree: Any, otherwise: Any) -> Any:
    """Return `tree` if `condition` is true, else `otherwise`; structures, shapes and dtypes must be equal.

    An elementwise select, not a conditional: it fuses with the update, and the host of a GPU does not have to wait for
    the condition before it launches a branch.
    """
    return jax.tree.map(partial(jax.lax.select, condition), tree, otherwise)
