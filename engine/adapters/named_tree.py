"""Pytrees of other libraries as nested dictionaries, whose keys name each array by its path."""

from typing import Any

import jax
from jax.tree_util import keystr, tree_leaves_with_path


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
