"""The dtypes of arrays in files: those that a format lacks are stored as another one, without loss.

Owns which dtypes safetensors and Orbax's arrays can hold. Needs no jax device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

# Those of 16 bits and more that safetensors stores and gives back as NumPy arrays.
_IN_WEIGHTS = {"bool", "float16", "float32", "float64", "bfloat16", "complex64"}
_IN_WEIGHTS |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
# Dtypes of one byte an element in memory that TensorStore does not know.
_NOT_IN_SNAPSHOTS = {"float8_e4m3", "float6_e2m3fn", "float6_e3m2fn", "int1", "uint1", "uint2", "uint4"}


def check_weight_types(params: Any, batch_stats: Any) -> None:
    """Raise ValueError, with its name, for an array that a file of weights cannot hold; leaves may be abstract."""
    for path, leaf in jax.tree_util.tree_leaves_with_path({"params": params, "batch_stats": batch_stats}):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        dtype = np.dtype(leaf.dtype)
        if dtype.name not in _IN_WEIGHTS and not _is_narrow(dtype):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"weights must be of a dtype that can be stored, but {name} is {dtype.name}: make it "
                f"{'complex64' if dtype.kind == 'c' else 'float32'}"
            )


def as_weights(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as it is stored in a file of weights: of at most eight bits, as float32, int8 or uint8."""
    if array.dtype.name in _IN_WEIGHTS or not _is_narrow(array.dtype):
        return array
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(np.float32)
    return array.astype(np.uint8 if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else np.int8)


def may_stand_for(found: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Return whether stored weights of one dtype fit a model's of another: any floats, and integers that were widened.

    Args:
        found: the dtype in the file.
        wanted: the dtype of the model.
    """
    if jnp.issubdtype(found, jnp.floating) and jnp.issubdtype(wanted, jnp.floating):
        return True
    return found == wanted or (_is_narrow(wanted) and found == as_weights(np.zeros((), wanted)).dtype)


def as_snapshot(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as it is stored in a snapshot: the bytes of a dtype that TensorStore does not know."""
    return array.view(np.uint8) if array.dtype.name in _NOT_IN_SNAPSHOTS else array


def from_snapshot(array: NDArray[Any], name: str) -> NDArray[Any]:
    """Return an array of a snapshot with the dtype that it had, by its name; undoes `as_snapshot`."""
    if name in _NOT_IN_SNAPSHOTS and array.dtype == np.uint8:
        return array.view(getattr(ml_dtypes, name))
    return array


def _is_narrow(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is one of ml_dtypes' of at most one byte."""
    return dtype.isbuiltin != 1 and dtype.itemsize == 1
