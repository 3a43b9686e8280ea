"""The stateful optax transformations that the optimizers use, written so that a loop updates their state in place.

The parameters' update reads the new moments. If XLA recomputes these there from the old moments (see
`loopfeed.models.layers.stored`), the old ones cannot be overwritten, and the loop copies moments and parameters at
every step, which takes a quarter of a step of ResNet-50 at 64 px. Here the new moments are stored, and everything else
reads them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float32

from loopfeed.engine.updates.skipping import choose
from loopfeed.models.layers.stored import stored


def trace(momentum: Float32[Array, ""], *, nesterov: bool, made: Bool[Array, ""]) -> optax.GradientTransformation:
    """Return `optax.trace` (a decayed sum of past gradients); its state is unchanged if `made` is false."""
    inner = optax.trace(momentum)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, moved = inner.update(updates, state, params)
        kept = _store(made, moved, state)
        if not nesterov:
            return kept.trace, kept
        return jax.tree.map(lambda gradient, moment: gradient + momentum * moment, updates, kept.trace), kept

    return optax.GradientTransformation(inner.init, update)


def scale_by_adam(
    b1: Float32[Array, ""], b2: Float32[Array, ""], epsilon: Float32[Array, ""], *, made: Bool[Array, ""]
) -> optax.GradientTransformation:
    """Return `optax.scale_by_adam`, which keeps two moments; its state is unchanged if `made` is false."""
    inner = optax.scale_by_adam(b1=b1, b2=b2, eps=epsilon)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, moved = inner.update(updates, state, params)
        kept = _store(made, moved, state)
        mean = optax.tree.bias_correction(kept.mu, b1, kept.count)
        square = optax.tree.bias_correction(kept.nu, b2, kept.count)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mean, square), kept

    return optax.GradientTransformation(inner.init, update)


def keeping(inner: optax.GradientTransformation, *, made: Bool[Array, ""]) -> optax.GradientTransformation:
    """Return `inner` with a state that is unchanged if `made` is false; its updates are then unusable."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, moved = inner.update(updates, state, params)
        return stored((updates, choose(made, moved, state)))

    return optax.GradientTransformation(inner.init, update)


def _store(made: Bool[Array, ""], moved: Any, before: Any) -> Any:
    return stored(choose(made, moved, before))
