"""Conversion of typed PRNG keys to and from uint32 arrays, because files and callbacks accept only numeric arrays."""

from typing import Any

import jax
import jax.numpy as jnp


def plain_keys(tree: Any) -> Any:
    """Return a pytree with each typed key replaced by its uint32 data and all other leaves unchanged."""
    return jax.tree.map(plain_key, tree)


def plain_key(leaf: Any) -> Any:
    """Return the uint32 data of a typed key; return any other leaf unchanged."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def is_key(leaf: Any) -> bool:
    """Return whether an array or `jax.ShapeDtypeStruct` has a PRNG key dtype."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def like_leaf(plain: Any, leaf: Any) -> Any:
    """Undo `plain_key`: if `leaf` (an array or `jax.ShapeDtypeStruct`) has a key dtype, wrap `plain` as keys."""
    if not is_key(leaf):
        return plain
    impls: list[Any] = []
    # `key_impl` needs keys, but `leaf` may be only their shape and dtype: tracing turns it into keys.
    jax.eval_shape(lambda keys: impls.append(jax.random.key_impl(keys)), leaf)
    return jax.random.wrap_key_data(jnp.asarray(plain), impl=impls[0])
