"""Generators' keys as the numbers that they consist of, since files and callbacks take numbers alone."""

from typing import Any

import jax
import jax.numpy as jnp


def plain_keys(tree: Any) -> Any:
    """Gives a pytree with the uint32 numbers of each typed key in the key's place; other leaves are as they were."""
    return jax.tree.map(plain_key, tree)


def plain_key(leaf: Any) -> Any:
    """Gives a typed key's uint32 numbers; any other leaf as it is."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
