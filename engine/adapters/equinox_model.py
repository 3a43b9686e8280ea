"""The adapter of Equinox."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopfeed.engine.adapters.library import (
    cast_floats,
    cast_like,
    check_precision,
    image_keys,
    load,
    mode_arguments,
    nest,
    takes,
    unnest,
)
from loopfeed.models.model import Model


def equinox(model: Any, state: Any = None, *, axis_name: str = "batch", precision: str = "float32") -> Model:
    """Adapt an Equinox model.

    As is usual in Equinox, its call takes one image `[3, H, W]`, channels first, and returns logits `[K]`; with a state
    it takes (image, state) and returns (logits, state). The adapter maps it over the batch. Layers `eqx.nn.Conv2d` use
    the loop-safe convolution, and `eqx.nn.BatchNorm` computes in float32.

    Args:
        model: a function of a key that returns the model, or the model and its `eqx.nn.State`, whose parameters are
            then drawn from the seed of the run; or a model, whose parameters are the initial ones for every seed.
        state: the `eqx.nn.State` of a model that has one.
        axis_name: the name of the batch axis, which `eqx.nn.BatchNorm` was given.
        precision: "float32", or "bfloat16" to compute with images and parameters cast to it. Parameters, state and
            logits are float32.

    Returns:
        The model, named after the model's class. Its `apply` takes PRNG keys as `key`, one or [B], and passes a key
        for each image to the model, if its call has an argument `key`.

    Raises:
        ValueError: if `model` is neither an Equinox module nor a function that returns one.
        ModuleNotFoundError: if Equinox is not installed.
    """
    eqx, dtype = load("equinox"), check_precision(precision)
    if not isinstance(model, eqx.Module) and not callable(model):
        raise ValueError(
            f"equinox needs an eqx.Module, or a function of a key that returns one, got {type(model).__name__}"
        )

    def make(key: jax.Array) -> _Parts:
        return _split(eqx, *((model, state) if isinstance(model, eqx.Module) else _pair(eqx, model(key))))

    static: list[Any] = []  # a traced function can return only arrays
    like = jax.eval_shape(lambda key: _arrays(make(key), static), jax.random.key(0))
    name = type(static[0]).__name__

    def init(key: jax.Array) -> tuple[Any, Any]:
        arrays = _arrays(make(key), [])
        return nest(arrays["params"]), {part: nest(arrays[part]) for part in ("buffers", "state") if like_of(part)}

    def like_of(part: str) -> bool:
        return bool(jax.tree.leaves(like[part]))

    def apply(
        params: Any, batch_stats: Any, images: jax.Array, train: bool, key: jax.Array | None = None
    ) -> tuple[Any, Any]:
        weights, buffers, old = (
            unnest(nested, like[part])
            for part, nested in (
                ("params", cast_floats(params, dtype)),
                ("buffers", batch_stats.get("buffers", {})),
                ("state", batch_stats.get("state", {})),
            )
        )
        network = eqx.nn.inference_mode(eqx.combine(weights, buffers, static[0]), value=not train)
        keys = image_keys(key, len(images))
        channels_first = images.astype(dtype).transpose(0, 3, 1, 2)
        outputs, new = _map(network, channels_first, old, keys, axis_name, train=train)
        new_stats = batch_stats | ({"state": nest(new)} if train and like_of("state") else {})
        return cast_floats(outputs, jnp.float32), cast_like(new_stats, batch_stats)

    return Model(name, init, apply)


class _Parts(NamedTuple):
    """A model as its parameters, other arrays, state, and everything else."""

    params: Any
    buffers: Any
    state: Any
    static: Any


def _pair(eqx: Any, made: Any) -> tuple[Any, Any]:
    """Return what a function made as (model, state).

    Raises:
        ValueError: if it made neither a model nor such a pair.
    """
    model, state = made if isinstance(made, tuple) and len(made) == len(("model", "state")) else (made, None)
    if not isinstance(model, eqx.Module):
        raise ValueError(
            f"equinox needs a function of a key that returns an eqx.Module, but it returned {type(model).__name__}"
        )
    return model, state


def _split(eqx: Any, model: Any, state: Any) -> _Parts:
    from loopfeed.engine.adapters.equinox_layers import with_loop_safe_layers

    params, rest = eqx.partition(with_loop_safe_layers(model), eqx.is_inexact_array)
    buffers, static = eqx.partition(rest, eqx.is_array)
    return _Parts(params, buffers, state, static)


def _arrays(parts: _Parts, static: list[Any]) -> dict[str, Any]:
    """Return the parts that hold arrays; append the other one to `static`."""
    static.append(parts.static)
    return {"params": parts.params, "buffers": parts.buffers, "state": parts.state}


def _map(
    network: Callable[..., Any], images: jax.Array, state: Any, keys: Any, axis_name: str, *, train: bool
) -> tuple[Any, Any]:
    """Call a network for each image; return the outputs `[B, …]` and the new state, which all images share."""
    call = type(network).__call__
    mode = mode_arguments(call, train)

    def one(image: jax.Array, key: jax.Array | None) -> tuple[Any, Any]:
        more = mode | ({"key": key} if takes(call, "key") else {})
        return network(image, **more) if state is None else network(image, state, **more)

    def stateless(image: jax.Array, key: jax.Array | None) -> tuple[Any, Any]:
        return one(image, key), None

    function = stateless if state is None else one
    key_axis = None if keys is None else 0
    return jax.vmap(function, in_axes=(0, key_axis), out_axes=(0, None), axis_name=axis_name)(images, keys)
