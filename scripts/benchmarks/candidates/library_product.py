"""oneDNN's own product of two square matrices, the second in the layout that the library prefers, on all cores."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from loopfeed.models.kernels.onednn.library import load_library
from loopfeed.models.kernels.onednn.primitives import (
    Arg,
    Builder,
    DataType,
    Query,
    Tag,
    Value,
    operand,
    pieces,
    result,
)
from loopfeed.models.kernels.onednn.team import PythonTeam

_ALIGNED = 64
_TASKS_PER_THREAD = 2


def make_product(side: int, dtype: str) -> tuple[Callable[[int], None], str]:
    """Return a function that multiplies matrices `[side, side]` so many times, and the name of the kernel.

    Args:
        side: their height and width.
        dtype: "float32" or "bfloat16", of operands and result; sums are float32.

    Raises:
        loopfeed.models.kernels.MissingKernelsError: if oneDNN cannot be used here.
    """
    library = load_library()
    team, element = PythonTeam(library), np.dtype(jnp.dtype(dtype))
    with library.one_thread():
        pack, packed_bytes, product = _build(Builder(library), Builder(library), side, dtype)
    num_bytes = side**2 * element.itemsize
    x, y, z, packed = (_aligned(size) for size in (num_bytes, num_bytes, num_bytes, packed_bytes))
    x.view(element)[:], y.view(element)[:] = 1, 1 / side
    team.run(pack, [y.ctypes.data], [packed.ctypes.data])

    def multiply(num_products: int) -> None:
        for _ in range(num_products):
            team.run(product, [x.ctypes.data, packed.ctypes.data], [z.ctypes.data])

    multiply(1)
    if not (z.view(element) == 1).all():
        raise RuntimeError("oneDNN's product of a matrix of ones and a matrix of means is not a matrix of ones")
    return multiply, f"oneDNN {library.version} {product.names[0]}"


def _build(packing: Builder, builder: Builder, side: int, dtype: str) -> tuple[Any, int, Any]:
    """Return the sequence that packs the second matrix, the bytes of the packed one, and the product by rows."""
    kind, row_bytes = DataType[dtype.upper()], side * jnp.dtype(dtype).itemsize
    plain, own = (builder.describe((side, side), kind, tag) for tag in (Tag.AB, Tag.ANY))
    tasks = []
    for start, size in pieces(side, _TASKS_PER_THREAD * builder.library.num_threads):
        rows = builder.describe((size, side), kind, Tag.AB)
        descriptor = builder.find("matmul", rows, own, None, rows)
        own = builder.layout(descriptor, Query.WEIGHTS)
        arguments: dict[int, Value] = {
            Arg.SOURCE: Value(rows, operand(0).after(start * row_bytes)),
            Arg.WEIGHTS: Value(own, operand(1)),
            Arg.RESULT: Value(rows, result(0).after(start * row_bytes)),
        }
        tasks.append(builder.task(builder.create(descriptor), arguments))
    builder.run(tasks)
    packing.reorder(Value(plain, operand(0)), Value(own, result(0)), [])
    return packing.finish(), builder.num_bytes(own), builder.finish()


def _aligned(num_bytes: int) -> np.ndarray[Any, Any]:
    memory = np.zeros(num_bytes + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + num_bytes]
