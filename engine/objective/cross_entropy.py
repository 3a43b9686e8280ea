"""The training loss: softmax cross entropy."""

import jax
import jax.numpy as jnp

from models.layers.widening import widen


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the softmax cross entropy, averaged over the batch.

    Args:
        logits: [B, K] of any float dtype; converted to float32.
        targets: float32 [B, K], rows that sum to 1; a NaN row makes the loss NaN.

    Returns:
        float32 [], in nats.
    """
    return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(widen(logits)), axis=-1))
