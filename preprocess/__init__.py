"""Offline preprocessing: converts images to shards of packed pixels, and reads such shards. Never imports jax.

These names are the public API; any other name may move or change without notice. They are loaded on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preprocess.demo.demo_set import pack_demo
    from preprocess.pixels import pack_rgb, unpack_rgb
    from preprocess.shards.location import ShardError
    from preprocess.shards.reader import ChangedShardError, ShardSplit, open_split
    from preprocess.shards.shard_cache import ShardCache
    from preprocess.shards.splits import list_splits
    from preprocess.shards.verify import Damage, verify_split

_HOME = {
    "ChangedShardError": "preprocess.shards.reader",
    "Damage": "preprocess.shards.verify",
    "ShardCache": "preprocess.shards.shard_cache",
    "ShardError": "preprocess.shards.location",
    "ShardSplit": "preprocess.shards.reader",
    "list_splits": "preprocess.shards.splits",
    "open_split": "preprocess.shards.reader",
    "pack_demo": "preprocess.demo.demo_set",
    "pack_rgb": "preprocess.pixels",
    "unpack_rgb": "preprocess.pixels",
    "verify_split": "preprocess.shards.verify",
}

__all__ = [
    "ChangedShardError",
    "Damage",
    "ShardCache",
    "ShardError",
    "ShardSplit",
    "list_splits",
    "open_split",
    "pack_demo",
    "pack_rgb",
    "unpack_rgb",
    "verify_split",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'preprocess' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
