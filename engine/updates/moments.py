"""The two optax transformations that remember something, computed so that a loop changes what they remember in place.

The parameters' update is a reader of the new moments: computed anew there (`models.layers.stored`), from the old ones,
these
could not be written over, and the loop copied moments and parameters at every step: a fourth of one of ResNet-50 at 64
px. Here the new moments are stored, and everything else reads those.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from engine.updates.skipping import choose
from models.layers.stored import stored


def trace(momentum: jax.Array, *, nesterov: bool, made: jax.Array) -> optax.GradientTransformation:
    """`optax.trace`, which remembers the sum of past gradients; where `made`, bool [], is false, it stays."""
    inner = optax.trace(momentum)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, moved = inner.update(updates, state, params)
        kept = _store(made, moved, state)
        if not nesterov:
            return kept.trace, kept
        return jax.tree.map(lambda gradient, moment: gradient + momentum * moment, updates, kept.trace), kept

    return optax.GradientTransformation(inner.init, update)


def scale_by_adam(b1: jax.Array, b2: jax.Array, epsilon: jax.Array, *, made: jax.Array) -> optax.GradientTransformation:
    """`optax.scale_by_adam`, which remembers two moments; where `made`, bool [], is false, they stay."""
    inner = optax.scale_by_adam(b1=b1, b2=b2, eps=epsilon)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, moved = inner.update(updates, state, params)
        kept = _store(made, moved, state)
        mean = optax.tree.bias_correction(kept.mu, b1, kept.count)
        square = optax.tree.bias_correction(kept.nu, b2, kept.count)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mean, square), kept

    return optax.GradientTransformation(inner.init, update)


def _store(made: jax.Array, moved: Any, before: Any) -> Any:
    return stored(choose(made, moved, before))
