"""Image models as pure functions over pytrees. This package depends only on jax and NumPy.

These names are the public API; any other name may move or change without notice. They are loaded on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.layers.batch_norm import RunningStats, batch_norm
    from models.layers.convolution import convolution
    from models.layers.head import dense, global_average_pool
    from models.layers.lax_convolution import conv_general_dilated
    from models.layers.pooling import max_pool
    from models.model import Model
    from models.registry import build_model, count_params, model_names
    from models.torchvision_names import from_torchvision, to_torchvision

_HOME = {
    "Model": "models.model",
    "RunningStats": "models.layers.batch_norm",
    "batch_norm": "models.layers.batch_norm",
    "build_model": "models.registry",
    "conv_general_dilated": "models.layers.lax_convolution",
    "convolution": "models.layers.convolution",
    "count_params": "models.registry",
    "dense": "models.layers.head",
    "from_torchvision": "models.torchvision_names",
    "global_average_pool": "models.layers.head",
    "max_pool": "models.layers.pooling",
    "model_names": "models.registry",
    "to_torchvision": "models.torchvision_names",
}

__all__ = [
    "Model",
    "RunningStats",
    "batch_norm",
    "build_model",
    "conv_general_dilated",
    "convolution",
    "count_params",
    "dense",
    "from_torchvision",
    "global_average_pool",
    "max_pool",
    "model_names",
    "to_torchvision",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'models' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
