"""Arrays of dtypes that NumPy lacks, such as bfloat16, on their way to the host.

DLPack hands NumPy only its own dtypes, so an array of another dtype crosses as one of those, bit for bit or exactly
widened, and gets its dtype back on the host.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

_BYTE_BITS = 8

type Restore = Callable[[NDArray[Any]], NDArray[Any]]
"""(the array that crossed) → an array of the dtype that it had; a view if that is possible."""


def as_plain(array: jax.Array) -> tuple[jax.Array, Restore | None]:
    """Return an array as one of NumPy's own dtypes, and what restores its dtype on the host; called while tracing.

    Args:
        array: of any shape and dtype.

    Returns:
        The array itself and None if its dtype is NumPy's own. The bits as unsigned integers of the same width if its
        elements fill bytes; otherwise, as of int4, the elements as the smallest dtype of NumPy that holds them all.

    Raises:
        TypeError: if it is an array of PRNG keys, which `loopfeed.engine.keys` converts.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"what crosses to the host must be arrays of numbers, got {array.dtype}: convert it first")
    dtype = np.dtype(array.dtype)
    if dtype.isbuiltin == 1:
        return array, None
    if jax.dtypes.itemsize_bits(dtype) >= _BYTE_BITS:
        plain = lax.bitcast_convert_type(array, jnp.dtype(f"uint{_BYTE_BITS * dtype.itemsize}"))
        return plain, lambda crossed: crossed.view(dtype)
    return array.astype(wider_type(dtype)), lambda crossed: crossed.astype(dtype)


def wider_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of NumPy that holds every element of a dtype of at most eight bits: int8, uint8 or float32."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float32)
    return np.dtype(np.uint8 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int8)
