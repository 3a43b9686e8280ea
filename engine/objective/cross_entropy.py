"""The loss that training minimises."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Softmax cross entropy, the mean over the batch.

    Args:
        logits: [B, K] of any float type; computed in float32.
        targets: float32 [B, K], rows that sum to 1; a row that is NaN makes the loss NaN.

    Returns:
        float32 [], in nats.
    """
    return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits.astype(jnp.float32)), axis=-1))
