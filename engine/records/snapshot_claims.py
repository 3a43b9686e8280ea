"""Compares what the arrays of a snapshot claim to be with its facts and its files, before memory is taken for them.

A few bytes can claim any shape, and stand for numbers that fill the memory. Reads no array. Must not know what the
arrays mean.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import tensorstore as ts

from loopfeed.engine.records.orbax_store import arrays_store
from loopfeed.preprocess.claimed_size import is_plausible

_MOST_ARRAYS = 100_000
# NumPy multiplies the sizes of an empty array, too, those of zero left out.
_MOST_SIZES = 1 << 48
# Orbax stores each array as zarr under its path, joined by dots.
_ARRAY_KEY = "/.zarray"
_MOST_ARRAY_BYTES = 1 << 16


def find_false_claim(path: Path, described: Mapping[str, Any], stored_bytes: int) -> str | None:
    """Return what is wrong with the claims of a snapshot, None if nothing is.

    Args:
        path: the folder of the snapshot.
        described: the dtype and the shape of each array by name, as the facts have them.
        stored_bytes: the size of its files.

    Raises:
        Exception: of any type, if the files cannot be read.
    """
    if len(described) > _MOST_ARRAYS:
        return f"it lists {len(described):,} arrays, of at most {_MOST_ARRAYS:,}"
    claimed_bytes, shapes = 0, {}
    for name, like in described.items():
        try:
            shape, itemsize = like["shape"], jnp.dtype(like["dtype"]).itemsize
        except (KeyError, TypeError, AttributeError):
            return f"its metadata do not describe {name}"
        is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
        if not is_shape or math.prod(size or 1 for size in shape) >= _MOST_SIZES:
            return f"{name} cannot have the shape {str(shape)[:80]}"
        claimed_bytes += math.prod(shape) * itemsize
        if 0 not in shape:
            shapes[name] = shape
    if not is_plausible(claimed_bytes, stored_bytes):
        return f"its arrays would take {claimed_bytes:,} bytes, but its files have {stored_bytes:,}"
    return _find_misfit(path, shapes) if shapes else None


def _find_misfit(path: Path, shapes: Mapping[str, list[int]]) -> str | None:
    """Return how the stored arrays differ from these shapes; None if they do not."""
    store = ts.KvStore.open(arrays_store(path)).result()
    for name, shape in shapes.items():
        found = store.read(name + _ARRAY_KEY).result()
        if found.state != "value" or not _claims_shape(bytes(found.value), shape):
            return f"{name} does not have the shape {shape} that it was written with"
    keys = {key.decode("utf-8", "replace") for key in store.list().result() if key.endswith(_ARRAY_KEY.encode())}
    others = keys - {each + _ARRAY_KEY for each in shapes}
    return f"{min(others).removesuffix(_ARRAY_KEY)} is not one of its arrays" if others else None


def _claims_shape(text: bytes, shape: list[int]) -> bool:
    """Return whether the metadata of an array have a shape, and parts that are no larger."""
    try:
        # TensorStore crashes for JSON that is nested deeply, which this refuses.
        claimed = json.loads(text) if len(text) <= _MOST_ARRAY_BYTES else {}
        parts = claimed["chunks"]
        return bool(claimed["shape"] == shape and len(parts) == len(shape)) and all(
            type(part) is int and 1 <= part <= max(size, 1) for part, size in zip(parts, shape, strict=True)
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
