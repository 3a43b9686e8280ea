"""Adapters that make a model of another library trainable: Flax Linen, Flax NNX and Equinox.

Each returns a `loopfeed.Model`, whose parameters and running statistics are nested dictionaries of arrays. The library
is imported when its adapter is called.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopfeed.engine.adapters.equinox_model import equinox
    from loopfeed.engine.adapters.linen import flax_linen
    from loopfeed.engine.adapters.nnx import flax_nnx

_HOME = {
    "equinox": "loopfeed.engine.adapters.equinox_model",
    "flax_linen": "loopfeed.engine.adapters.linen",
    "flax_nnx": "loopfeed.engine.adapters.nnx",
}

__all__ = ["equinox", "flax_linen", "flax_nnx"]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(
            f"module 'loopfeed.engine.adapters' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
