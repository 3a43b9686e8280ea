"""What the adapters need of other libraries: their import, mode, keys, precision, and arrays by path."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

# Arguments by which a model's call is told that it is, or is not, in training.
_TRAINING = ("train", "training", "is_training")
_EVALUATION = ("deterministic", "use_running_average", "inference")


def load(module: str) -> Any:
    """Import a module of another library.

    Raises:
        ModuleNotFoundError: if the library is not installed.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"the adapter needs {package}, which is not installed: pip install {package}", name=error.name
        ) from None


def takes(call: Callable[..., Any], argument: str) -> bool:
    """Return whether a function has an argument of this name."""
    return argument in inspect.signature(call).parameters


def mode_arguments(call: Callable[..., Any], train: bool) -> dict[str, bool]:
    """Return the arguments that tell a model's call whether it is in training, by the names that the call declares."""
    training = {name: train for name in _TRAINING if takes(call, name)}
    return training | {name: not train for name in _EVALUATION if takes(call, name)}


def batch_key(key: jax.Array | None) -> jax.Array | None:
    """Return one PRNG key for a whole batch from the keys [B] of its images: that of the first; [] stays as it is."""
    return key if key is None or key.ndim == 0 else key[0]


def image_keys(key: jax.Array | None, batch: int) -> jax.Array | None:
    """Return one PRNG key for each of B images, [B]: the given ones, or those that one key is split into."""
    return key if key is None or key.ndim == 1 else jax.random.split(key, batch)


_PRECISIONS = ("float32", "bfloat16")


def check_precision(precision: str) -> Any:
    """Return the dtype of a precision.

    Raises:
        ValueError: if it is neither float32 nor bfloat16.
    """
    if precision not in _PRECISIONS:
        raise ValueError(f"precision must be {' or '.join(_PRECISIONS)}, got {precision!r}: choose one of them")
    return jnp.dtype(precision)


def cast_floats(tree: Any, dtype: Any) -> Any:
    """Cast the floating-point leaves of a pytree to `dtype`; other leaves stay as they are."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


def cast_like(tree: Any, like: Any) -> Any:
    """Cast each leaf of a pytree to the dtype of the corresponding leaf of `like`."""
    return jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), tree, like)


def nest(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree in nested dictionaries, by the strings of their paths."""
    nested: dict[str, Any] = {}
    for path, leaf in tree_leaves_with_path(tree):
        *folders, name = _names(path)
        inner = nested
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = leaf
    return nested


def unnest(nested: Any, like: Any) -> Any:
    """Return the pytree of the structure of `like` whose leaves are those of `nested`; the inverse of `nest`."""
    leaves = [_find(nested, path) for path, _ in tree_leaves_with_path(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _find(nested: Any, path: Any) -> Any:
    for name in _names(path):
        nested = nested[name]
    return nested


def _names(path: Any) -> list[str]:
    return [keystr((key,), simple=True) for key in path] or ["value"]
