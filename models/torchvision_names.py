"""Conversion of parameters to and from torchvision's names and PyTorch's layouts.

The keys of this package's nested parameters are already torchvision's module paths. Only the last word of a name and
the order of a kernel's axes differ, and PyTorch keeps parameters and running statistics in one flat dictionary.
`resnet50-d`, which torchvision does not have, has the names of timm's `resnet50d`.
`convnet8`, which torchvision does not have, uses its own paths (`stage1.0.conv.weight`) and the same layouts; its norms
have no weight, and their bias is stored without the factor `models.families.pooled_convnet.BIAS_GAIN`. The fixed stem
kernel of `convnet8-wide`, `models.families.pooled_convnet.cosine_kernel`, is not stored.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from models.model import BatchStats, Params
from models.registry import find_network, init_network

type Leaves = dict[str, Any]

WORDS = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
COUNTER = "num_batches_tracked"
_MAX_NAMED = 10


def to_torchvision(model_name: str, params: Params, batch_stats: BatchStats) -> dict[str, np.ndarray]:
    """Return a model's arrays as a flat dictionary for `torch.nn.Module.load_state_dict`.

    Args:
        model_name: one of `models.registry.model_names()`.
        params: parameters of that model.
        batch_stats: batch statistics of that model.

    Returns:
        Contiguous float32 arrays by name (`layer1.0.conv1.weight` …): convolutions OIHW, the classifier `[K,C]`. Each
        norm also has an int64 `num_batches_tracked` of 0, because batches are not counted here.

    Raises:
        ValueError: if the model is unknown, or the arrays are not this model's.
    """
    tensors: dict[str, np.ndarray] = {}
    for path, leaf in (*_leaves(params), *_leaves(batch_stats)):
        tensors[_torch_name(path)] = _to_torch_layout(np.asarray(leaf, np.float32))
        if path[-1] == "var":
            tensors[".".join((*path[:-1], COUNTER))] = np.zeros((), np.int64)
    _check(model_name, tensors)
    return tensors


def from_torchvision(model_name: str, tensors: Mapping[str, np.ndarray]) -> tuple[Params, BatchStats]:
    """Convert arrays in torchvision's names and layouts to parameters and batch statistics (inverts `to_torchvision`).

    Args:
        model_name: one of `models.registry.model_names()`.
        tensors: arrays by name; `num_batches_tracked` is optional and ignored. The length of `fc.bias` is the number of
            classes.

    Returns:
        Float32 NumPy arrays in this package's nesting and layouts.

    Raises:
        ValueError: if the model is unknown, names are missing or unexpected, or shapes differ.
    """
    _check(model_name, tensors)

    def take(path: tuple[str, ...]) -> np.ndarray:
        return _from_torch_layout(np.asarray(tensors[_torch_name(path)], np.float32))

    params, batch_stats = _shapes(model_name, tensors["fc.bias"].shape[0])
    return _fill(params, take), _fill(batch_stats, take)


def _leaves(tree: Leaves, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every array in nested dictionaries together with its path."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(dict(value), (*path, key))
        else:
            yield (*path, key), value


def _fill(tree: Leaves, take: Any, path: tuple[str, ...] = ()) -> Leaves:
    return {
        key: _fill(value, take, (*path, key)) if isinstance(value, dict) else take((*path, key))
        for key, value in tree.items()
    }


def _torch_name(path: tuple[str, ...]) -> str:
    return ".".join((*path[:-1], WORDS[path[-1]]))


def _to_torch_layout(array: np.ndarray) -> np.ndarray:
    """Transpose HWIO to OIHW and `[C,K]` to `[K,C]`; leave other arrays unchanged."""
    axes = {4: (3, 2, 0, 1), 2: (1, 0)}.get(array.ndim)
    return np.ascontiguousarray(array.transpose(axes)) if axes else array


def _from_torch_layout(array: np.ndarray) -> np.ndarray:
    axes = {4: (2, 3, 1, 0), 2: (1, 0)}.get(array.ndim)
    return np.ascontiguousarray(array.transpose(axes)) if axes else array


def _shapes(model_name: str, num_classes: int) -> tuple[Params, BatchStats]:
    """Return the shapes and dtypes of the model's parameters and statistics."""
    return jax.eval_shape(partial(init_network, find_network(model_name), num_classes), jax.random.key(0))


def _check(model_name: str, tensors: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError with the first mismatches if the tensors are not exactly those of the model."""
    if "fc.bias" not in tensors or tensors["fc.bias"].ndim != 1:
        find_network(model_name)
        raise ValueError(
            f"{model_name} needs a vector fc.bias, whose length is the number of classes, but there is none; "
            "pass the complete state dictionary"
        )
    params, batch_stats = _shapes(model_name, tensors["fc.bias"].shape[0])
    expected = {
        _torch_name(path): _to_torch_layout(np.empty(leaf.shape, np.bool_)).shape
        for path, leaf in (*_leaves(params), *_leaves(batch_stats))
    }
    others = [
        f"{name} is {tensors[name].shape} instead of {shape}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    found = (name for name in tensors if name.rpartition(".")[2] != COUNTER or name in expected)
    if faults := describe_mismatches(expected, found, others):
        raise ValueError(f"the tensors are not those of {model_name}: {faults}; choose another model")


def describe_mismatches(expected: Iterable[str], found: Iterable[str], others: Iterable[str]) -> str:
    """Return a list of what does not match, with at most ten of each kind by name; empty if everything matches.

    Args:
        expected, found: the names of the model's tensors, and of those that were found.
        others: other faults, each with the name of its tensor.
    """
    expected, found = list(expected), list(found)
    is_expected, is_found = set(expected), set(found)
    kinds = (
        ("missing ", ", ", [name for name in expected if name not in is_found]),
        ("unexpected ", ", ", [name for name in found if name not in is_expected]),
        ("", "; ", list(others)),
    )
    return "; ".join(
        start
        + separator.join(faults[:_MAX_NAMED])
        + (f" and {more} more" if (more := len(faults) - _MAX_NAMED) > 0 else "")
        for start, separator, faults in kinds
        if faults
    )
