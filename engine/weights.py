"""Trained weights as named tensors, for `model.safetensors`."""

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from models.torchvision_names import has_torchvision_names, to_torchvision


def name_tensors(model_name: str, params: Any, batch_stats: Any) -> dict[str, NDArray[Any]]:
    """Names every tensor of a model.

    Args:
        model_name: as the registry knows it, or any other for a model of the user's.
        params, batch_stats: its pytrees.

    Returns:
        torchvision's names and layouts where the model is one of torchvision's ResNets; else the path of each leaf,
        `params.…` and `batch_stats.…`, in the model's own layout.
    """
    if has_torchvision_names(model_name):
        return to_torchvision(model_name, params, batch_stats)
    trees = {"params": params, "batch_stats": batch_stats}
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}
