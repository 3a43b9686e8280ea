"""Skipping of updates that would make weights NaN or infinite.

`optax.apply_if_finite` applies such an update after too many were skipped in a row. Here none is ever applied, and too
many skips in a row end the loop.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from loopfeed.engine.keys import is_key
from loopfeed.engine.updates.clipping import global_norm
from loopfeed.models.layers.materialize import materialize


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
