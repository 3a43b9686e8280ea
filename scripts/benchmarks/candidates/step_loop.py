"""Feedloop's training step on a resident batch: N updates in one `lax.while_loop`, N a runtime value.

The update is SGD with momentum, as every candidate makes it; the engine's own also looks whether the gradient is
finite, clips and decays.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax
from protocol import Channel, timed
from resident_training import LEARNING_RATE, MOMENTUM, State, make_step, versions
from work_of_models import image_flop

from engine.updates.moments import trace


def main(name: str, image_size: int, batch: int, num_classes: int) -> None:
    """Serve `batch` images a unit."""
    channel = Channel()
    momentum = trace(jnp.float32(MOMENTUM), nesterov=False, made=jnp.bool_(True))
    optimizer = optax.chain(momentum, optax.scale(-LEARNING_RATE))
    state, step, facts = make_step(optimizer, name, image_size, batch, num_classes)

    @partial(jax.jit, donate_argnums=0)
    def train(state: State, num_steps: jax.Array) -> State:
        def body(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
            return carry[0] + 1, step(carry[1])

        return lax.while_loop(lambda carry: carry[0] < num_steps, body, (jnp.int32(0), state))[1]

    def work(num_units: int) -> None:
        nonlocal state
        state = jax.block_until_ready(train(state, jnp.int32(num_units)))

    work(1)
    flop = image_flop(name, image_size, num_classes)
    facts |= {"first loss": round(float(state.loss), 5), "GFLOP an image": flop / 1e9}
    run = timed(work)

    def run_and_count(num_units: int) -> tuple[float, dict[str, float]]:
        seconds = run(num_units)
        return seconds, {"GFLOP/s": flop * batch * num_units / seconds / 1e9}

    channel.ready(batch, versions=versions(), facts=facts)
    channel.serve(run_and_count)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
