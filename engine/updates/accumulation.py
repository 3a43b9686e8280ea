"""Sums over several pulls before one update is made: larger batches than fit at once.

The sums and their number of pulls are part of the loop's carry, so a run that stops between two updates goes on where
it stood. `optax.MultiSteps` was left: it hides the mean from the check that refuses an update, has no place for the
losses that belong to the same update, and keeps a running mean, which rounds at every pull.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Accumulation(NamedTuple):
    """What was gathered since the last update.

    Attributes:
        num_pulls: int32 [], in the sums.
        sums: pytree of float32 leaves.
    """

    num_pulls: jax.Array
    sums: Any


def init_accumulation(tree: Any) -> Accumulation:
    """Nothing gathered yet, for trees of this one's structure and shapes (arrays, or their shapes and types)."""
    return Accumulation(
        jnp.zeros((), jnp.int32), jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.float32), tree)
    )


def accumulate(gathered: Accumulation, new: Any, every: jax.Array) -> tuple[Any, jax.Array, Accumulation]:
    """Adds one pull's values.

    The mean of k means of b images each is the mean of the k · b images: k pulls make the update that one pull of a
    batch k times as large would, for a model without batch statistics.

    Args:
        gathered: what came before.
        new: pytree of the structure given to `init_accumulation`, of any float types.
        every: int32 [], pulls for an update, a runtime value; below 1 counts as 1. Where a resumed run has lowered it
            beneath what is gathered already, the update is due at once, over all that is gathered.

    Returns:
        The mean over the pulls gathered (float32), whether an update is due (bool []), and what is left to gather on:
        nothing where it is due.
    """
    num_pulls = gathered.num_pulls + 1
    sums = jax.tree.map(lambda total, leaf: total + leaf.astype(jnp.float32), gathered.sums, new)
    due = num_pulls >= every
    means = jax.tree.map(lambda total: total / num_pulls.astype(jnp.float32), sums)
    left = jax.tree.map(lambda total: jnp.where(due, 0, total), sums)
    return means, due, Accumulation(jnp.where(due, 0, num_pulls), left)
