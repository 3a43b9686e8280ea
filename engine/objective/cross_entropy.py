"""The training loss: softmax cross entropy."""

import jax
import jax.numpy as jnp

from loopfeed.models.layers.widening import widen


def without_zero_weights(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the values, with 0 where their weight is 0, so that 0 times an infinite value is 0 in a weighted sum.

    So it is in the limit, t · log p → 0 for t → 0, in the value and in its derivative.
    """
    return jnp.where(weights == 0, 0, values)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the softmax cross entropy, averaged over the batch.

    Args:
        logits: [B, K] of any float dtype; converted to float32.
        targets: float32 [B, K], rows that sum to 1; a NaN row makes the loss NaN. A class with target 0 may have a
            logit of minus infinity, as a masked class has.

    Returns:
        float32 [], in nats.
    """
    log_probabilities = without_zero_weights(jax.nn.log_softmax(widen(logits)), targets)
    return -jnp.mean(jnp.sum(targets * log_probabilities, axis=-1))
