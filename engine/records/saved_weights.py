"""The weights in the `model.safetensors` of a run as pytrees, for use in Python.

Owns how names become nested dictionaries. Must not know where the weights are used.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray

from loopfeed.engine.records.weights import StoredWeights, part_of
from loopfeed.engine.records.weights import read_weights as read_stored
from loopfeed.models.registry import model_names
from loopfeed.models.torchvision_names import from_torchvision
from loopfeed.preprocess.printable import printable

_MAX_DEPTH = 100


class SavedWeights(NamedTuple):
    """The weights in a file.

    Attributes:
        params, batch_stats: nested dictionaries of NumPy arrays, or one array if that is what the model has. Keys are
            str: the index of a list or tuple, or the name of an attribute, becomes one too. A PRNG key is its uint32
            numbers (`jax.random.wrap_key_data`).
        metadata: the file's metadata, such as `model`, `image_size`, `mean` and `std`.
    """

    params: Any
    batch_stats: Any
    metadata: dict[str, str]

    def __repr__(self) -> str:
        model = printable(self.metadata.get("model", "an unknown model"))
        return f"SavedWeights({model}; params, batch_stats and metadata)"


def read_weights(path: str | os.PathLike[str]) -> SavedWeights:
    """Read the weights that a run wrote, `RUN/model.safetensors`, and check their digest.

    For a model of your own these are the leaves `params.…` and `batch_stats.…` in the model's own layouts and dtypes;
    for a registry model, the float32 arrays that `loopfeed.from_torchvision` returns.

    Raises:
        ValueError: if the file cannot be read, has changed since it was written, or is not a run's.

    Example:
        >>> read_weights("run/model.safetensors").params["kernel"].shape
        (3, 2)
    """
    return weights_as_pytrees(read_stored(path), os.fspath(path))


def weights_as_pytrees(stored: StoredWeights, name: str) -> SavedWeights:
    """Return the weights of a run as `read_weights` does; raises ValueError, with the name of their place."""
    if stored.is_of_user_model:
        try:
            tree = _nest(stored.tensors)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return SavedWeights(tree.pop("params"), tree.pop("batch_stats", {}), stored.metadata)
    model = stored.metadata.get("model")
    if model not in model_names():
        raise ValueError(
            f"weights must be those of a run, but {name} records the model {printable(model or 'none')}, and "
            "has no params.…: for torchvision's names use loopfeed.from_torchvision"
        )
    try:
        params, batch_stats = from_torchvision(model, stored.tensors)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return SavedWeights(params, batch_stats, stored.metadata)


def _nest(tensors: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return nested dictionaries of arrays whose names are the keys joined by dots."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *keys, last = name.split(".")
        if len(keys) > _MAX_DEPTH or part_of(name) is None:
            raise ValueError(f"every name must be a path from params or batch_stats, got {printable(name)}")
        branch = tree
        for key in keys:
            branch = branch.setdefault(key, {})
            if not isinstance(branch, dict):
                raise ValueError(f"a tensor's name must not begin with that of another, got {printable(name)}")
        if last in branch:
            raise ValueError(f"a tensor's name must not begin with that of another, got {printable(name)}")
        branch[last] = tensor
    return tree
