"""The training loss: softmax cross entropy."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loopfeed.models.layers.widening import widen


def without_zero_weights(values: Float[Array, "*shape"], weights: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the values, with 0 where their weight is 0, so that 0 times an infinite value is 0 in a weighted sum.

    So it is in the limit, t · log p → 0 for t → 0, in the value and in its derivative.
    """
    return jnp.where(weights == 0, 0, values)


def cross_entropy(logits: Float[Array, "B K"], targets: Float[Array, "B K"]) -> Float[Array, ""]:
    """Return the softmax cross entropy in nats, averaged over the batch, computed in float32.

    Args:
        logits: the logits.
        targets: rows that sum to 1; a NaN row makes the loss NaN. A class with target 0 may have a logit of minus
            infinity, as a masked class has.
    """
    log_probabilities = without_zero_weights(jax.nn.log_softmax(widen(logits)), targets)
    return -jnp.mean(jnp.sum(targets * log_probabilities, axis=-1))
