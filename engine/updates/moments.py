"""The two optax transformations that remember something, computed so that a loop changes what they remember in place.

XLA computes what is elementwise anew for every reader. The parameters' update is a reader of the new moments: it would
compute them from the old ones, so that neither could be written over, and the loop copied moments and parameters at
every step: of ResNet-50, a tenth of a step at 64 px. Here the new moments are stored, and everything else reads those.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from engine.updates.skipping import choose


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
    return lax.optimization_barrier(choose(made, moved, before))
