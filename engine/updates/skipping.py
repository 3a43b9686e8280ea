"""Updates that are not made, because a gradient is not finite.

`optax.apply_if_finite` makes such an update after all, once too many were refused in a row; here none is ever made,
and too many in a row are the sign to leave the loop.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from engine.updates.clipping import global_norm


class Skips(NamedTuple):
    """How often an update was refused.

    Attributes:
        total: int32 [], in the run so far.
        in_a_row: int32 [], since the last update that was made.
    """

    total: jax.Array
    in_a_row: jax.Array


def init_skips() -> Skips:
    """No update refused yet."""
    return Skips(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def count_skips(skips: Skips, due: jax.Array, finite: jax.Array) -> Skips:
    """Counts one pull: `due`, bool [], whether an update is due; `finite`, bool [], whether it may be made."""
    refused, made = due & ~finite, due & finite
    more = refused.astype(jnp.int32)
    return Skips(skips.total + more, jnp.where(made, 0, skips.in_a_row + more))


def gives_up(skips: Skips, most_in_a_row: jax.Array) -> jax.Array:
    """Says, bool [], whether more than `most_in_a_row` (int32 [], a runtime value) updates were refused in a row."""
    return skips.in_a_row > most_in_a_row


def has_finite_norm(tree: Any) -> jax.Array:
    """Says, bool [], whether the global norm of a pytree of float leaves is finite in float32.

    The norm that clipping takes anyway answers for all leaves in one pass. A norm beyond 1.8e19, whose square no
    float32 holds, counts as infinite: clipping could not scale such a gradient either.
    """
    return jnp.isfinite(global_norm(tree))


def all_finite(tree: Any) -> jax.Array:
    """Says, bool [], whether every number of a pytree of float leaves is finite; a tree without leaves is."""
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(finite)) if finite else jnp.ones((), jnp.bool)


def choose(condition: jax.Array, tree: Any, otherwise: Any) -> Any:
    """Takes one of two pytrees of the same structure, shapes and types, by a bool [].

    A selection in the midst of the arithmetic, not a conditional: it fuses with the update, and does not make the host
    of a GPU wait to learn which branch to launch.
    """
    return jax.tree.map(partial(jax.lax.select, condition), tree, otherwise)
