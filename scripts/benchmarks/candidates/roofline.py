"""A perfect step: the bytes that it must move, at the memory's rate, and its products, at the rate of a large one.

For each step it makes triads x ← s·x + y on all cores over arrays beyond any cache (after McCalpin's STREAM, 1995), as
many as move the step's bytes, and then square matrix products in the precision of the step, as many as have its
floating-point operations: by oneDNN where it is installed, otherwise by XLA. So both rates are those of the same round.

What is assumed (see `work_of_models.py` for the bytes): layers run one after the other, and each reads and writes its
arrays once, through memory; memory and products do not overlap; everything but products is free. A step can pass this
limit: arrays that stay in a cache between two layers cost less, as those of small networks may, and so do layers that
are joined, or products while another core waits for memory.
"""

import math
import sys
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from library_product import make_product
from protocol import Channel, jax_versions, timed
from work_of_models import work_of

from loopfeed.models.kernels import MissingKernelsError

SIDE = 2048
_TRIAD_LENGTH = 1 << 25
_TRIAD_BYTES = 3 * 4 * _TRIAD_LENGTH
_PRODUCT_FLOP = 2 * SIDE**3


@partial(jax.jit, donate_argnums=0)
def _triads(x: jax.Array, y: jax.Array, num_triads: jax.Array) -> jax.Array:
    return lax.fori_loop(0, num_triads, lambda _, x: 0.5 * x + y, x)


@partial(jax.jit, donate_argnums=0)
def _products(x: jax.Array, y: jax.Array, num_products: jax.Array) -> jax.Array:
    return lax.fori_loop(0, num_products, lambda _, x: x @ y, x)


def make_triad() -> Callable[[int], None]:
    """Return a function that makes so many triads, each of which reads two arrays and writes one."""
    x, y = jnp.ones(_TRIAD_LENGTH, jnp.float32), jnp.full(_TRIAD_LENGTH, 0.5, jnp.float32)  # keeps x at 1

    def work(num_triads: int) -> None:
        nonlocal x
        x = jax.block_until_ready(_triads(x, y, jnp.int32(num_triads)))

    work(1)
    return work


def make_xla_product(dtype: str) -> Callable[[int], None]:
    """Return a function that makes so many products of matrices `[SIDE, SIDE]` by XLA, in a `lax.while_loop`."""
    x, y = jnp.ones((SIDE, SIDE), dtype), jnp.full((SIDE, SIDE), 1 / SIDE, dtype)  # keeps x at 1

    def work(num_products: int) -> None:
        nonlocal x
        x = jax.block_until_ready(_products(x, y, jnp.int32(num_products)))

    work(1)
    return work


def seconds_for(amount: float, piece: float, work: Callable[[int], None]) -> float:
    """Return how long an amount takes at the rate of the least number of whole pieces that contain it."""
    num_pieces = math.ceil(amount / piece)
    started = time.perf_counter()
    work(num_pieces)
    return (time.perf_counter() - started) * amount / (num_pieces * piece)


def main(kind: str, dtype: str, name: str, image_size: int, batch: int, num_classes: int) -> None:
    """Serve `batch` images a unit: bytes and products ("step"), or only products by XLA ("products")."""
    channel = Channel()
    work = work_of(name, image_size, num_classes)
    step_flop, step_bytes = batch * work.image_flop, work.step_bytes(batch, jnp.dtype(dtype).itemsize)
    if kind == "products":
        multiply = make_xla_product(dtype)
        channel.ready(_PRODUCT_FLOP / work.image_flop, versions=jax_versions())
        channel.serve(timed(multiply))
    try:
        product, product_name = make_product(SIDE, dtype)
    except MissingKernelsError:
        product, product_name = make_xla_product(dtype), "XLA"
    triad = make_triad()

    def run(num_units: int) -> tuple[float, dict[str, float]]:
        num_bytes, flop = num_units * step_bytes, num_units * step_flop
        moving_s = seconds_for(num_bytes, _TRIAD_BYTES, triad)
        multiplying_s = seconds_for(flop, _PRODUCT_FLOP, product)
        seconds = moving_s + multiplying_s
        return seconds, {
            "GB/s": num_bytes / moving_s / 1e9,
            "GFLOP/s": flop / multiplying_s / 1e9,
            "part for memory": moving_s / seconds,
        }

    facts = {"GB a step": step_bytes / 1e9, "GFLOP a step": step_flop / 1e9, "products by": product_name}
    channel.ready(batch, versions=jax_versions(), facts=facts)
    channel.serve(run)


if __name__ == "__main__":
    kind, dtype, name, *sizes = sys.argv[1:]
    main(kind, dtype, name, *map(int, sizes))
