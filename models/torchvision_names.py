"""Conversion of parameters to and from torchvision's names and PyTorch's layouts.

The keys of this package's nested parameters are already torchvision's module paths. Only the last word of a name and
the order of a kernel's axes differ, and PyTorch keeps parameters and running statistics in one flat dictionary.
Networks that torchvision lacks, or builds otherwise, have timm's names instead: `loopfeed.models.names.TIMM_NAMES` has
all networks that timm has too, and the names of their tensors are timm's (for ResNets those of both).
`convnet8`, which torchvision does not have, uses its own paths (`stage1.0.conv.weight`) and the same layouts; its norms
have no weight, and their bias is stored without the factor `loopfeed.models.families.pooled_convnet.BIAS_GAIN`. The
fixed stem kernel of `convnet8-wide`, `loopfeed.models.families.pooled_convnet.cosine_kernel`, is not stored.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from loopfeed.models.families.vision_transformer import CLASS_TOKEN, POSITIONS, VisionTransformer, size_of_positions
from loopfeed.models.model import BatchStats, Params
from loopfeed.models.registry import Network, at_image_size, find_network, init_network

type Leaves = dict[str, Any]

KERNEL = "kernel"
_OF_LAYERS = {KERNEL: "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
# Parameters of no layer have the same name in PyTorch; "gamma" is ConvNeXt's layer scale.
WORDS = _OF_LAYERS | {word: word for word in (CLASS_TOKEN, POSITIONS, "gamma")}
COUNTER = "num_batches_tracked"
_MAX_NAMED = 10


def to_torchvision(model_name: str, params: Params, batch_stats: BatchStats) -> dict[str, np.ndarray]:
    """Return a model's arrays as a flat dictionary for `torch.nn.Module.load_state_dict`.

    Args:
        model_name: one of `loopfeed.models.registry.model_names()`.
        params: parameters of that model.
        batch_stats: batch statistics of that model.

    Returns:
        Contiguous float32 arrays by name (`layer1.0.conv1.weight` …): convolutions OIHW, dense layers `[K,C]`. Each
        batch norm also has an int64 `num_batches_tracked` of 0, because batches are not counted here.

    Raises:
        ValueError: if the model is unknown, or the arrays are not this model's.

    Example:
        >>> network = build_model("resnet18", num_classes=10, image_size=64)
        >>> shapes = jax.eval_shape(network.init, jax.random.key(0))
        >>> params, batch_stats = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        >>> to_torchvision("resnet18", params, batch_stats)["conv1.weight"].shape
        (64, 3, 7, 7)
    """
    tensors: dict[str, np.ndarray] = {}
    for path, leaf in (*_leaves(params), *_leaves(batch_stats)):
        tensors[_torch_name(path)] = _to_torch_layout(path, np.asarray(leaf, np.float32))
        if path[-1] == "var":
            tensors[".".join((*path[:-1], COUNTER))] = np.zeros((), np.int64)
    _check(model_name, tensors)
    return tensors


def from_torchvision(model_name: str, tensors: Mapping[str, np.ndarray]) -> tuple[Params, BatchStats]:
    """Convert arrays in torchvision's names and layouts to parameters and batch statistics (inverts `to_torchvision`).

    Args:
        model_name: one of `loopfeed.models.registry.model_names()`.
        tensors: arrays by name; `num_batches_tracked` is optional and ignored. The length of the classifier's bias is
            the number of classes. The position embedding of a vision transformer determines the size of its images.

    Returns:
        Float32 NumPy arrays in this package's nesting and layouts.

    Raises:
        ValueError: if the model is unknown, names are missing or unexpected, or shapes differ.

    Example:
        >>> network = build_model("resnet18", num_classes=10, image_size=64)
        >>> shapes = jax.eval_shape(network.init, jax.random.key(0))
        >>> arrays = to_torchvision("resnet18", *jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes))
        >>> params, batch_stats = from_torchvision("resnet18", arrays)
        >>> params["conv1"]["kernel"].shape
        (7, 7, 3, 64)
    """
    _check(model_name, tensors)

    def take(path: tuple[str, ...]) -> np.ndarray:
        return _from_torch_layout(path, np.asarray(tensors[_torch_name(path)], np.float32))

    params, batch_stats = _shapes(model_name, tensors)
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


def _to_torch_layout(path: tuple[str, ...], array: np.ndarray) -> np.ndarray:
    """Transpose kernels, HWIO to OIHW and `[C,K]` to `[K,C]`; leave other arrays unchanged."""
    return _transposed(path, array, (3, 2, 0, 1))


def _from_torch_layout(path: tuple[str, ...], array: np.ndarray) -> np.ndarray:
    return _transposed(path, array, (2, 3, 1, 0))


def _transposed(path: tuple[str, ...], array: np.ndarray, image_axes: tuple[int, ...]) -> np.ndarray:
    if path[-1] != KERNEL:
        return array
    return np.ascontiguousarray(array.transpose(image_axes if array.ndim == len(image_axes) else None))


def num_classes_of(model_name: str, tensors: Mapping[str, np.ndarray]) -> int | None:
    """Return the number of classes of a model's tensors in torchvision's names, None if they have no classifier."""
    bias = tensors.get(f"{find_network(model_name).head}.bias")
    return None if bias is None or bias.ndim != 1 else len(bias)


def _network(model_name: str, tensors: Mapping[str, np.ndarray]) -> Network:
    """Return the architecture, for the image size that the tensors are for."""
    net, positions = find_network(model_name), tensors.get(POSITIONS)
    if isinstance(net, VisionTransformer) and positions is not None and positions.ndim == 3:
        return at_image_size(net, size_of_positions(net, positions.shape[1]) or net.image_size)
    return net


def _shapes(model_name: str, tensors: Mapping[str, np.ndarray]) -> tuple[Params, BatchStats]:
    """Return the shapes and dtypes of the model's parameters and statistics for these tensors' classes and images."""
    num_classes = num_classes_of(model_name, tensors)
    if num_classes is None:
        raise ValueError(
            f"{model_name} needs a vector {find_network(model_name).head}.bias, whose length is the number of classes, "
            "but there is none; pass the complete state dictionary"
        )
    net = _network(model_name, tensors)
    return jax.eval_shape(partial(init_network, net, num_classes), jax.random.key(0))


def _check(model_name: str, tensors: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError with the first mismatches if the tensors are not exactly those of the model."""
    params, batch_stats = _shapes(model_name, tensors)
    expected = {
        _torch_name(path): _to_torch_layout(path, np.empty(leaf.shape, np.bool_)).shape
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
