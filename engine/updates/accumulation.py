"""Gradient accumulation over several batches per update, for batch sizes that do not fit into memory.

The sums and their number of batches are part of the loop's carry, so a run that stops between two updates resumes
there. `optax.MultiSteps` is not used: it hides the mean from the check that skips an update, does not accumulate the
losses of the same update, and keeps a running mean, which rounds at every batch.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from loopfeed.models.layers.to_float32 import to_float32, wide_dtype


class Accumulation(NamedTuple):
    """The values accumulated since the last update.

    Attributes:
        num_batches: number of batches in the sums.
        sums: pytree of float32 leaves.
    """

    num_batches: Int32[Array, ""]
    sums: Any


def init_accumulation(tree: Any) -> Accumulation:
    """Return sums initialised to zero, with the structure and shapes of `tree`.

    The leaves of `tree` may be `jax.ShapeDtypeStruct`s.
    """
    return Accumulation(
        jnp.zeros((), jnp.int32), jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), wide_dtype(leaf)), tree)
    )


def accumulate(
    accumulated: Accumulation, new: Any, every: Int32[Array, ""]
) -> tuple[Any, Bool[Array, ""], Accumulation]:
    """Add the values of one batch to the sums, and return the mean so far.

    The mean of k means of b images each is the mean of the k · b images: without batch statistics, k batches make the
    same update as one batch k times as large.

    Args:
        accumulated: the sums of the previous batches.
        new: pytree of the structure given to `init_accumulation`, of any float dtypes.
        every: batches per update, a runtime value; below 1 counts as 1. If a resumed run has lowered it below the
            number of batches already accumulated, the update is due at once, over all of them.

    Returns:
        The mean over the accumulated batches (float32), whether an update is due, and the sums for the next batch:
        empty if an update is due.
    """
    num_batches = accumulated.num_batches + 1
    sums = jax.tree.map(lambda total, leaf: total + to_float32(leaf), accumulated.sums, new)
    due = num_batches >= every
    means = jax.tree.map(lambda total: total / num_batches.astype(jnp.float32), sums)
    remaining = jax.tree.map(lambda total: jnp.where(due, 0, total), sums)
    return means, due, Accumulation(jnp.where(due, 0, num_batches), remaining)
