"""The adapter of Flax NNX."""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopfeed.engine.adapters.library import (
    batch_key,
    cast_floats,
    cast_like,
    check_precision,
    load,
    mode_arguments,
    nest,
    takes,
    unnest,
)
from loopfeed.models.layers.lax_convolution import conv_general_dilated
from loopfeed.models.model import Model


def flax_nnx(module: Any, *, precision: str = "float32") -> Model:
    """Adapt a Flax NNX module.

    Its call takes images `[B, H, W, 3]` and returns logits `[B, K]`. `module.train()` or `module.eval()` is called
    before it. Variables other than `nnx.Param` and the random streams are carried as running statistics. The layers
    `nnx.Conv` use the loop-safe convolution, unless they were given another.

    Args:
        module: a function or class that takes `rngs` and returns the module, whose parameters are then drawn from the
            seed of the run; or a module, whose parameters are the initial ones for every seed. It is not changed.
        precision: "float32", or "bfloat16" to compute with images and parameters cast to it. Parameters, running
            statistics and logits are float32.

    Returns:
        The model, named after the module's class. Its `apply` takes PRNG keys as `key`, one or [B]; dropout
        and other draws use the first.

    Raises:
        ValueError: if `module` is neither a module nor a function that returns one.
        ModuleNotFoundError: if Flax is not installed.
    """
    nnx, dtype = load("flax.nnx"), check_precision(precision)
    if not isinstance(module, nnx.Module) and not callable(module):
        raise ValueError(
            f"flax_nnx needs a flax.nnx.Module, or a function of rngs that returns one, got {type(module).__name__}"
        )
    made, name = _abstract(nnx, module)

    def init(key: jax.Array) -> tuple[Any, Any]:
        parts = _split(nnx, module if isinstance(module, nnx.Module) else _make(nnx, module, key))
        return nest(nnx.to_pure_dict(parts.params)), nest(nnx.to_pure_dict(parts.stats))

    def apply(
        params: Any, batch_stats: Any, images: jax.Array, train: bool, key: jax.Array | None = None
    ) -> tuple[Any, Any]:
        states = _fill(nnx, made.params, cast_floats(params, dtype)), _fill(nnx, made.stats, batch_stats)
        network = nnx.merge(made.graph, states[0], _draw_streams(made.streams, batch_key(key)), states[1])
        (network.train if train else network.eval)()
        counts = _counts(nnx, network)
        outputs = network(images.astype(dtype), **mode_arguments(type(network).__call__, train))
        if key is None and any(new is not old for new, old in zip(_counts(nnx, network), counts, strict=True)):
            raise ValueError(
                f"{name} draws random numbers in {'training' if train else 'evaluation'}, such as those of dropout, "
                "but got no key: pass key=… to apply, or leave the layer out"
            )
        changed = nest(nnx.to_pure_dict(_split(nnx, network).stats))
        new_stats = unnest(changed, batch_stats) if train else batch_stats
        return cast_floats(outputs, jnp.float32), cast_like(new_stats, batch_stats)

    return Model(name, init, apply)


class _Parts(NamedTuple):
    """A module as its structure and the states of its parameters, random streams and other variables."""

    graph: Any
    params: Any
    streams: Any
    stats: Any


def _split(nnx: Any, module: Any) -> _Parts:
    return _Parts(*nnx.split(module, nnx.Param, nnx.RngState, ...))


def _make(nnx: Any, function: Callable[..., Any], key: jax.Array) -> Any:
    rngs = nnx.Rngs(key)
    # The metaclass of nnx hides the arguments of a class.
    call = getattr(function, "__init__") if isinstance(function, type) else function  # noqa: B009
    network = function(rngs=rngs) if takes(call, "rngs") else function(rngs)
    if not isinstance(network, nnx.Module):
        raise ValueError(
            "flax_nnx needs a function of rngs that returns a flax.nnx.Module, but it returned "
            f"{type(network).__name__}"
        )
    return network


def _abstract(nnx: Any, module: Any) -> tuple[_Parts, str]:
    """Return the parts of a module with loop-safe convolutions and with shapes for arrays, and the module's name."""
    if isinstance(module, nnx.Module):
        network = nnx.clone(module)
    else:
        network = nnx.eval_shape(lambda: _make(nnx, module, jax.random.key(0)))
    for _, layer in nnx.iter_modules(network):
        if isinstance(layer, nnx.Conv) and layer.conv_general_dilated is lax.conv_general_dilated:
            layer.conv_general_dilated = conv_general_dilated
    return _split(nnx, network), type(network).__name__


def _fill(nnx: Any, state: Any, nested: Any) -> Any:
    """Return a copy of a state with the arrays of `nested`."""
    filled = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(filled, unnest(nested, nnx.to_pure_dict(state)))
    return filled


def _draw_streams(streams: Any, key: jax.Array | None) -> Any:
    """Return the state of the random streams: a key of its own for each, derived from its path, and no draws yet."""
    base = jax.random.key(0) if key is None else key

    def draw(path: Any, leaf: Any) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros(leaf.shape, leaf.dtype)
        own = jax.random.fold_in(base, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return jax.random.split(own, leaf.shape) if leaf.shape else own

    return jax.tree_util.tree_map_with_path(draw, streams)


def _counts(nnx: Any, network: Any) -> list[Any]:
    """Return the objects that count the draws of each random stream; a draw replaces the object."""
    return [node.count.get_value() for _, node in nnx.iter_graph(network) if isinstance(node, nnx.RngStream)]
