"""Where the logits are among the outputs of a model."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def logits_of(outputs: Any) -> Float[Array, "B K"]:
    """Return the logits among a model's outputs: the outputs themselves, or their entry "logits".

    Raises:
        ValueError: while tracing, if there are none.
    """
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
    if not isinstance(logits, jax.Array) or logits.ndim != 2:
        raise ValueError(
            "with class numbers as labels, a model must return logits [B, K], or a dictionary with such logits under "
            f'"logits", but returned {jax.tree.map(jnp.shape, outputs)}'
        )
    return logits
