"""The loss that training minimises."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Softmax cross entropy, the mean over the batch.

    Args:
        logits: [B, K] of any float type; computed in float32.
        labels: int32 [B], each in 0 … K - 1; made one-hot here.

    Returns:
        float32 [], in nats; NaN where a label is no class, which a host that does not know K can't refuse.
    """
    num_classes = logits.shape[-1]
    one_hot = jax.nn.one_hot(labels, num_classes, dtype=jnp.float32)
    losses = -jnp.sum(one_hot * jax.nn.log_softmax(logits.astype(jnp.float32)), axis=-1)
    return jnp.mean(jnp.where((labels >= 0) & (labels < num_classes), losses, jnp.nan))
