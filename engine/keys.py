"""Generators' keys as the numbers that they consist of, since files and callbacks take numbers alone."""

from typing import Any

import jax
import jax.numpy as jnp


def plain_keys(tree: Any) -> Any:
    """Gives a pytree with the uint32 numbers of each typed key in the key's place; other leaves are as they were."""
    return jax.tree.map(plain_key, tree)


def plain_key(leaf: Any) -> Any:
    """Gives a typed key's uint32 numbers; any other leaf as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def is_key(leaf: Any) -> bool:
    """Whether an array, or what describes one, is of typed keys."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def like_leaf(plain: Any, leaf: Any) -> Any:
    """Gives what `plain_key` made of an array like `leaf` as that again; `leaf` may be a `jax.ShapeDtypeStruct`."""
    if not is_key(leaf):
        return plain
    generators: list[Any] = []
    # The generator's name can be asked of keys alone, and `leaf` may be their shape: a tracer is as good as a key.
    jax.eval_shape(lambda keys: generators.append(jax.random.key_impl(keys)), leaf)
    return jax.random.wrap_key_data(jnp.asarray(plain), impl=generators[0])
