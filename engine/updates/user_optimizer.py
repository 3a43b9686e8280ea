"""User-defined optimizers: any optax transformation, or a function that makes one for a learning rate.

Adds what every optimizer of the loop has: clipping, skipped updates, the learning-rate factor, and groups.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal
from jaxtyping import Array, Float, Float32

from loopfeed.engine.given_values import describe_given, untraceable
from loopfeed.engine.patterns import Group
from loopfeed.engine.updates.optim import in_float32
from loopfeed.engine.updates.selection import dotted_path, groups_of, scale_leaves
from loopfeed.models.layers.platform_forms import materialize

type UserOptimizer = optax.GradientTransformation | Callable[[Float32[Array, ""]], optax.GradientTransformation]
"""A transformation with its own learning rate, or a function: learning rate → transformation."""


def has_user_rate(own: UserOptimizer) -> bool:
    """Return whether a user-defined optimizer is a transformation, whose learning rate is its own."""
    return isinstance(own, optax.GradientTransformation)


def make_user_optimizer(
    own: UserOptimizer,
    learning_rate: Float32[Array, ""],
    *,
    clip: optax.GradientTransformation,
    groups: Sequence[Group] = (),
) -> optax.GradientTransformationExtraArgs:
    """Return a user-defined optimizer as the loop needs it: in float32, with a state that keeps its form.

    Args:
        own: the optimizer. A transformation's updates are multiplied by `learning_rate`; a function receives it.
        learning_rate: traced.
        clip: clips the gradient first; it has no state.
        groups: factors on the updates of some parameters; static.

    Raises:
        ValueError: the function returns something else, a part of the optimizer cannot be traced, or an update changes
            the form of the state.
    """
    inner = _transformation(own, learning_rate)

    def init(params: Any) -> Any:
        # Copies, because a state may contain the parameters, and the loop is given both.
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), _init(inner, params))

    def update(updates: Any, state: Any, params: Any = None, *, value: Float[Array, ""]) -> tuple[Any, Any]:
        updates, _ = clip.update(updates, optax.EmptyState(), params)
        gradients = updates
        updates, moved = _update(inner, gradients, state, params, value)
        _check_updates(gradients, updates)
        _check_form(state, moved)
        # Stored, so that the caller, who chooses between them, reads both instead of computing them a second time.
        updates, moved = materialize((updates, moved))
        if has_user_rate(own):
            updates = jax.tree.map(lambda leaf: leaf * learning_rate, updates)
        updates = scale_leaves(updates, [group.learning_rate for group in groups_of(updates, groups)])
        return updates, moved

    return in_float32(optax.GradientTransformationExtraArgs(init, update))


def check_rate_not_stored(own: UserOptimizer, params: Any) -> None:
    """Raise ValueError if the state of an optimizer that a function makes depends on the learning rate.

    The state is created once, so the rate of the first step, or of no step, would remain in it.

    Args:
        own: the optimizer.
        params: the trained parameters, as arrays or `jax.ShapeDtypeStruct`s.
    """
    if has_user_rate(own):
        return
    inits = jax.make_jaxpr(lambda rate, params: in_float32(_transformation(own, rate)).init(params), return_shape=True)
    jaxpr, state = inits(jax.ShapeDtypeStruct((), jnp.float32), params)
    depends = _dependent(jaxpr.jaxpr, [True] + [False] * (len(jaxpr.jaxpr.invars) - 1))
    paths = [dotted_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    if found := [path for path, is_so in zip(paths, depends, strict=True) if is_so]:
        raise ValueError(
            f"the state of the optimizer stores the learning rate ({found[0]}), so that it would stay at its first "
            "value whatever the schedule: give a function whose state does not depend on the rate, such as optax.adam "
            "itself instead of optax.inject_hyperparams(optax.adam)"
        )


def _dependent(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Return which outputs of a jaxpr depend on the marked inputs."""
    marked = {variable for variable, is_marked in zip(jaxpr.invars, inputs, strict=True) if is_marked}

    def is_marked(atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in marked

    for equation in jaxpr.eqns:
        read = [is_marked(atom) for atom in equation.invars]
        called = getattr(equation.params.get("jaxpr"), "jaxpr", None)
        if called is not None and len(called.invars) == len(read):
            written = _dependent(called, read)
        else:
            written = [any(read)] * len(equation.outvars)
        marked.update(variable for variable, depends in zip(equation.outvars, written, strict=True) if depends)
    return [is_marked(atom) for atom in jaxpr.outvars]


def _transformation(own: UserOptimizer, learning_rate: jax.Array) -> optax.GradientTransformation:
    if isinstance(own, optax.GradientTransformation):
        return own
    rule = "the optimizer function must return an optax.GradientTransformation for a learning rate"
    try:
        made = own(learning_rate)
    except Exception as error:
        raise ValueError(
            f"{rule}, a traced float32 [], but calling it failed with {first_line(error)}: give a function of one "
            "argument that computes with the rate in jax only, such as optax.adabelief"
        ) from error
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(
            f"{rule}, but returned {type(made).__name__}: return one, such as optax.adabelief(learning_rate)"
        )
    return made


def _init(inner: optax.GradientTransformation, params: Any) -> Any:
    try:
        state = inner.init(params)
    except Exception as error:
        raise ValueError(
            f"the optimizer's init(params) failed with {first_line(error)}: it is given the trained parameters as the "
            "model's own pytree; transformations that need them in another form are not supported, so choose another"
        ) from error
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
            where = dotted_path(path) or "the state"
            raise ValueError(
                "the optimizer's init(params) must return a pytree of arrays as its state, but returned "
                f"{type(leaf).__name__} as {where}: leave it out, or make it an array"
            )
    return state


def _update(inner: optax.GradientTransformation, gradients: Any, state: Any, params: Any, loss: jax.Array) -> Any:
    # Some of optax's transformations, such as `contrib.reduce_on_plateau`, read the loss.
    extra = {"value": loss} if _takes_value(inner) else {}
    try:
        given: Any = inner.update(gradients, state, params, **extra)
    except Exception as error:
        if (refusal := untraceable("the optimizer's update", error)) is not None:
            raise refusal from error
        raise ValueError(
            f"the optimizer's update failed with {first_line(error)}: it is given the gradients, its state, the "
            "parameters as the model's own pytree and, as value, the loss; transformations that need more (line "
            "searches, optax.contrib.sam in opaque mode) or other parameters (optax.lookahead) are not supported, so "
            "choose another"
        ) from error
    if not isinstance(given, tuple | list) or len(given) != len(("updates", "state")):
        raise ValueError(
            "the optimizer's update(gradients, state, params) must return a tuple (updates, state), but returned "
            f"{describe_given(given)}: return these two, in this order, with the argument state if nothing changes it"
        )
    return given


def _check_updates(gradients: Any, updates: Any) -> None:
    """Raise ValueError if updates have not the structure and shapes of the gradients, or are no floats."""
    rule = "the optimizer's update(gradients, state, params) must return updates like the gradients, "
    before, after = (jax.tree_util.tree_leaves_with_path(tree) for tree in (gradients, updates))
    forms: list[Any] = [jax.tree.structure(tree) for tree in (gradients, updates)]
    if forms[0] != forms[1]:
        both = [{dotted_path(path): None for path, _ in leaves} for leaves in (before, after)]
        only = [path for path in both[0] | both[1] if path and (path in both[0]) != (path in both[1])]
        raise ValueError(
            f"{rule}the same pytree, but for {describe_given(gradients)} returned {describe_given(updates)}"
            + (f", and {only[0]} is in one of them only" if only else "")
            + ": make them with jax.tree.map(…, gradients)"
        )
    for (path, gradient), (_, update) in zip(before, after, strict=True):
        if jnp.shape(update) != gradient.shape or not jnp.issubdtype(jnp.result_type(update), jnp.floating):
            raise ValueError(
                f"{rule}floats of the same shapes, but for {dotted_path(path) or 'a gradient'}, "
                f"{describe_given(gradient)}, returned {describe_given(update)}: return a float for each number of the "
                "gradient, for example with jnp.broadcast_to"
            )


def _takes_value(inner: optax.GradientTransformation) -> bool:
    if not isinstance(inner, optax.GradientTransformationExtraArgs):
        return False
    parameters = inspect.signature(inner.update).parameters.values()
    return any(each.name == "value" or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def first_line(error: Exception) -> str:
    """Return the type and the first line of an error, because jax's messages have many lines."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0].removesuffix('.')}" if lines else type(error).__name__


def _check_form(before: Any, after: Any) -> None:
    """Raise ValueError if the state after an update differs in structure, shapes or dtypes from the state before."""
    old, new = (jax.tree_util.tree_leaves_with_path(state) for state in (before, after))
    forms: list[Any] = [jax.tree.structure(state) for state in (before, after)]
    if forms[0] != forms[1]:
        raise ValueError(
            "the state of an optimizer must keep its structure, but an update changes it: return the state in the form "
            "in which init(params) returned it"
        )
    for (path, was), (_, now) in zip(old, new, strict=True):
        if (was.shape, was.dtype) != (now.shape, now.dtype):
            raise ValueError(
                f"the state of an optimizer must keep its shapes and dtypes, but {dotted_path(path)} was {was.dtype} "
                f"{list(was.shape)} and an update makes it {now.dtype} {list(now.shape)}: cast it in the update"
            )
