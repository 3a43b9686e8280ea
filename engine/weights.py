"""Trained weights as named tensors, for `model.safetensors`."""

from typing import Any

import jax
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
    trees = {"params": params, "batch_stats": batch_stats}
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}
