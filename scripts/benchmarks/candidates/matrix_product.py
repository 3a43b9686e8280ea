"""The machine's limit of products: a square float32 matrix product inside a `lax.while_loop`.

Its unit is images of a model: the number that the same operations would train.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from protocol import Channel, timed
from resident_training import versions
from work_of_models import work_of

SIDE = 2048


@partial(jax.jit, donate_argnums=0)
def multiply(x: jax.Array, y: jax.Array, num_products: jax.Array) -> jax.Array:
    """Multiply `x` by `y`, [SIDE, SIDE] of one dtype, repeatedly."""
    return lax.fori_loop(0, num_products, lambda _, x: x @ y, x)


def main(name: str, image_size: int, num_classes: int) -> None:
    """Serve the images that 2 · SIDE³ operations would train."""
    channel = Channel()
    x = jnp.ones((SIDE, SIDE), jnp.float32)
    y = jnp.full((SIDE, SIDE), 1 / SIDE, jnp.float32)  # keeps x at 1

    def work(num_units: int) -> None:
        nonlocal x
        x = jax.block_until_ready(multiply(x, y, jnp.int32(num_units)))

    work(1)
    run = timed(work)

    def run_and_count(num_units: int) -> tuple[float, dict[str, float]]:
        seconds = run(num_units)
        return seconds, {"GFLOP/s": 2 * SIDE**3 * num_units / seconds / 1e9}

    channel.ready(2 * SIDE**3 / work_of(name, image_size, num_classes).image_flop, versions=versions())
    channel.serve(run_and_count)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
