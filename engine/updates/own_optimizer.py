"""User-defined optimizers: any optax transformation, or a function that makes one for a learning rate.

Adds what every optimizer of the loop has: clipping, skipped updates, the learning-rate factor, and groups.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from engine.patterns import Group
from engine.updates.optim import in_float32
from engine.updates.selection import dotted_path, groups_of, scale_leaves
from engine.updates.skipping import choose
from models.layers.stored import stored

type OwnOptimizer = optax.GradientTransformation | Callable[[jax.Array], optax.GradientTransformation]
"""A transformation with its own learning rate, or a function: learning rate (float32 []) → transformation."""


def has_own_rate(own: OwnOptimizer) -> bool:
    """Return whether a user-defined optimizer is a transformation, whose learning rate is its own."""
    return isinstance(own, optax.GradientTransformation)


def make_own_optimizer(
    own: OwnOptimizer,
    learning_rate: jax.Array,
    *,
    clip: optax.GradientTransformation,
    made: jax.Array,
    groups: Sequence[Group] = (),
) -> optax.GradientTransformationExtraArgs:
    """Return a user-defined optimizer as the loop needs it: in float32, with a state that keeps its form.

    Args:
        own: the optimizer. A transformation's updates are multiplied by `learning_rate`; a function receives it.
        learning_rate: float32 [], traced.
        clip: clips the gradient first; it has no state.
        made: bool [], whether the update is made. If false, the state is unchanged, and the updates must not be used.
        groups: factors on the updates of some parameters; static.

    Raises:
        ValueError: if the function returns something else, or an update changes the form of the state.
    """
    inner = optax.with_extra_args_support(_transformation(own, learning_rate))

    def init(params: Any) -> Any:
        # Copies, because a state may contain the parameters, and the loop is given both.
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, _ = clip.update(updates, optax.EmptyState(), params)
        updates, moved = inner.update(updates, state, params, **extra)
        _check_form(state, moved)
        # Stored, so that the loop updates the state in place (see `engine.updates.moments`).
        updates, moved = stored((updates, choose(made, moved, state)))
        if has_own_rate(own):
            updates = jax.tree.map(lambda leaf: leaf * learning_rate, updates)
        return scale_leaves(updates, [group.learning_rate for group in groups_of(updates, groups)]), moved

    return in_float32(optax.GradientTransformationExtraArgs(init, update))


def _transformation(own: OwnOptimizer, learning_rate: jax.Array) -> optax.GradientTransformation:
    if isinstance(own, optax.GradientTransformation):
        return own
    made = own(learning_rate)
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(
            "the optimizer function must return an optax.GradientTransformation for a learning rate, but returned "
            f"{type(made).__name__}: return one, such as optax.adabelief(learning_rate)"
        )
    return made


def _check_form(before: Any, after: Any) -> None:
    """Raise ValueError if the state after an update differs in structure, shapes or dtypes from the state before."""
    old, new = (jax.tree_util.tree_leaves_with_path(state) for state in (before, after))
    forms: list[Any] = [jax.tree.structure(state) for state in (before, after)]
    if forms[0] != forms[1]:
        raise ValueError("the state of an optimizer must keep its structure, but an update changes it")
    for (path, was), (_, now) in zip(old, new, strict=True):
        if (was.shape, was.dtype) != (now.shape, now.dtype):
            raise ValueError(
                f"the state of an optimizer must keep its shapes and dtypes, but {dotted_path(path)} was {was.dtype} "
                f"{list(was.shape)} and an update makes it {now.dtype} {list(now.shape)}: cast it in the update"
            )
