"""Measured rates of a device: how fast it multiplies matrices, and how fast it reads and writes its memory."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from loopfeed.models.kernels import ONEDNN, XLA
from loopfeed.models.kernels.onednn.operations import Product, call_operation

# Long enough for every core, and small enough for a second: 2·n³ operations, and bytes beyond any cache.
_CPU_SIZES, _GPU_SIZES = (1024, 256 << 20), (8192, 1 << 30)
_TURNS = 8
_MEASURE_S = 0.3


class DeviceRates(NamedTuple):
    """What a device reaches at best.

    Attributes:
        flops_per_s: floating-point operations per second in a product of large matrices.
        bytes_per_s: bytes per second read and written by an elementwise operation on arrays beyond its caches.
        dtype: the dtype of the matrices.
        device: the vendor's name for the device.
    """

    flops_per_s: float
    bytes_per_s: float
    dtype: str
    device: str

    @property
    def ridge(self) -> float:
        """The operations per byte above which arithmetic bounds a kernel, and below which memory does."""
        return self.flops_per_s / self.bytes_per_s

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Return the least time for so many operations and bytes (Williams et al., 2009, "Roofline")."""
        return max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)


def measure_device(device: jax.Device, dtype: DTypeLike = jnp.float32, *, kernels: str = XLA) -> DeviceRates:
    """Measure a device for about twice `_MEASURE_S` seconds, and return the fastest that it was.

    Args:
        device: a device of this process.
        dtype: dtype of the matrices; sums are float32.
        kernels: whose product it is, `XLA` or `ONEDNN`, which multiplies float32 and, on some processors, bfloat16.
    """
    n, moved_bytes = _CPU_SIZES if device.platform == "cpu" else _GPU_SIZES
    matrix = jax.device_put(jnp.ones((n, n), dtype), device)
    product = jax.jit(onednn_product if kernels == ONEDNN else xla_product)
    count = moved_bytes // 8
    numbers = jax.device_put(jnp.ones((count,), jnp.float32), device)
    # In a loop, because the memory of a new result costs more on a CPU than writing to it.
    move = jax.jit(lambda x, turns: lax.fori_loop(0, turns, lambda _, x: 2 * x + 1, x))
    return DeviceRates(
        flops_per_s=2 * n**3 / _shortest_s(lambda: product(matrix)),
        bytes_per_s=8 * count * _TURNS / _shortest_s(lambda: move(numbers, _TURNS)),
        dtype=str(jnp.dtype(dtype)),
        device=str(device.device_kind),
    )


def xla_product(x: jax.Array) -> jax.Array:
    """Return the float32 product of a square matrix with itself, by XLA."""
    return jnp.matmul(x, x, preferred_element_type=jnp.float32)


def onednn_product(x: jax.Array) -> jax.Array:
    """Return the float32 product of a square matrix with itself, by oneDNN."""
    product = Product(str(x.dtype), x.shape, x.shape, x_axis=1, y_axis=0)
    return call_operation(product, [jax.ShapeDtypeStruct(x.shape, jnp.float32)], x, x)[0]


def _shortest_s(work: Callable[[], jax.Array]) -> float:
    work().block_until_ready()
    started, shortest = time.perf_counter(), float("inf")
    while (begin := time.perf_counter()) < started + _MEASURE_S or shortest == float("inf"):
        work().block_until_ready()
        shortest = min(shortest, time.perf_counter() - begin)
    return shortest
