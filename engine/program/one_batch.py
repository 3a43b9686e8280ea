"""The pull of a single batch outside the training loop, through the run's own infeed; called while tracing."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from loopfeed.engine.crossing.infeed import Batch, BatchInfeed
from loopfeed.engine.crossing.token import first_token
from loopfeed.engine.program.pulls import for_each, pull_part
from loopfeed.engine.replicas import Replicas


class OneBatch(NamedTuple):
    """This device's part of one batch.

    Attributes:
        batch: the images and their labels.
        learning_rate_factor: the host's factor for this batch.
        is_there: whether there is a batch; otherwise its values are undefined.
    """

    batch: Batch
    learning_rate_factor: Float32[Array, ""]
    is_there: Bool[Array, ""]


def pull_one_batch(infeed: BatchInfeed, replicas: Replicas, shapes: Batch, batch_index: Int32[Array, ""]) -> OneBatch:
    """Pull the batch with number `pulls` as the training loop does.

    Args:
        infeed: the training infeed, from which nothing has been pulled.
        replicas: the devices.
        shapes: the shapes and dtypes of this device's part.
        batch_index: the number of the batch, from 0.
    """
    token, pulled = pull_part(infeed, first_token(), batch_index, jnp.ones((), jnp.int32), replicas)
    empty: Batch = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    none = jnp.zeros((), jnp.bool)
    _, (batch, is_there), _ = for_each(
        infeed,
        token,
        pulled,
        lambda _, batch: (batch, jnp.ones((), jnp.bool)),
        (empty, none),
        is_over=lambda carry: carry[1],
    )
    return OneBatch(batch, pulled.control.learning_rate_factor, is_there)
