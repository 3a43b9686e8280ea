"""Trained weights as named tensors, for `model.safetensors`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from models.torchvision_names import to_torchvision


def name_tensors(registry_name: str | None, params: Any, batch_stats: Any) -> dict[str, NDArray[Any]]:
    """Names every tensor of a model.

    Args:
        registry_name: the model's name in the registry, None for a model of the user's own, whatever it is called.
        params, batch_stats: its pytrees.

    Returns:
        torchvision's names and layouts for a ResNet of the registry; else the path of each leaf, `params.…` and
        `batch_stats.…`, in the model's own layout.
    """
    if registry_name is not None:
        return to_torchvision(registry_name, params, batch_stats)
    return {name: np.asarray(_plain(leaf)) for name, leaf in _named_leaves(params, batch_stats)}


def check_names(params: Any, batch_stats: Any) -> None:
    """Raises ValueError where two tensors of a model of the user's own would have one name; takes shapes too."""
    seen: set[str] = set()
    for name, _ in _named_leaves(params, batch_stats):
        if name in seen:
            raise ValueError(f"every tensor must have a path of its own, and two are called {name}: rename one's key")
        seen.add(name)


def _named_leaves(params: Any, batch_stats: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path({"params": params, "batch_stats": batch_stats})
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def _plain(leaf: Any) -> Any:
    """A generator's key as the numbers that it consists of; any other leaf as it is."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
