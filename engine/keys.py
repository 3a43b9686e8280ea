"""Conversion of PRNG keys to and from their uint32 data, because files and callbacks accept only numbers."""

from typing import Any

import jax
import jax.numpy as jnp


def plain_keys(tree: Any) -> Any:
    """Return a pytree with each typed key replaced by its uint32 data; other leaves stay."""
    return jax.tree.map(plain_key, tree)


def plain_key(leaf: Any) -> Any:
    """Return a typed key's uint32 data, or any other leaf as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def is_key(leaf: Any) -> bool:
    """Return whether an array, or a `jax.ShapeDtypeStruct`, is of typed keys."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def like_leaf(plain: Any, leaf: Any) -> Any:
    """Undo `plain_key` for an array like `leaf`, which may be a `jax.ShapeDtypeStruct`."""
    if not is_key(leaf):
        return plain
    impls: list[Any] = []
    # Only keys have an implementation's name, and `leaf` may be only their shape: tracing makes keys of it.
    jax.eval_shape(lambda keys: impls.append(jax.random.key_impl(keys)), leaf)
    return jax.random.wrap_key_data(jnp.asarray(plain), impl=impls[0])
