"""Loopfeed's training step on a resident batch: N updates in one `lax.while_loop`, N a runtime value.

The update is SGD with momentum, as every candidate makes it; the engine's own also looks whether the gradient is
finite, clips and decays. Kernels are chosen by name, or are oneDNN's wherever it can be used ("auto").
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from protocol import Answer, Channel, timed
from resident_training import LEARNING_RATE, MOMENTUM, State, make_step, versions
from work_of_models import work_of

from loopfeed.engine.updates.moments import trace
from loopfeed.models.kernels import ONEDNN, XLA, MissingKernelsError, using_kernels
from loopfeed.models.kernels.onednn.library import load_library


def chosen_kernels(name: str) -> tuple[str, dict[str, str]]:
    """Return the name of the kernels, and the version of oneDNN if they are its."""
    if name == XLA:
        return XLA, {}
    try:
        return ONEDNN, {"onednn": load_library().version}
    except MissingKernelsError:
        if name != "auto":
            raise
        return XLA, {}


def main(name: str, image_size: int, batch: int, num_classes: int, dtype: str, kernels: str) -> None:
    """Serve `batch` images a unit."""
    channel = Channel()
    chosen, library_versions = chosen_kernels(kernels)
    with using_kernels(chosen):
        run, facts = prepare(name, image_size, batch, num_classes, dtype)
        channel.ready(batch, versions=versions() | library_versions, facts=facts | {"kernels": chosen})
        channel.serve(run)


def prepare(
    name: str, image_size: int, batch: int, num_classes: int, dtype: str
) -> tuple[Callable[[int], Answer], dict[str, Any]]:
    """Compile the steps, and return the function that makes so many of them, and the facts."""
    momentum = trace(jnp.float32(MOMENTUM), nesterov=False, made=jnp.bool_(True))
    optimizer = optax.chain(momentum, optax.scale(-LEARNING_RATE))
    state, step, facts = make_step(optimizer, name, image_size, batch, num_classes, dtype)

    @partial(jax.jit, donate_argnums=0)
    def train(state: State, num_steps: jax.Array) -> State:
        def body(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
            return carry[0] + 1, step(carry[1])

        return lax.while_loop(lambda carry: carry[0] < num_steps, body, (jnp.int32(0), state))[1]

    def work(num_units: int) -> None:
        nonlocal state
        state = jax.block_until_ready(train(state, jnp.int32(num_units)))

    work(1)
    flop = work_of(name, image_size, num_classes).image_flop
    facts |= {"first loss": round(float(state.loss), 5), "GFLOP an image": flop / 1e9}
    run = timed(work)

    def run_and_count(num_units: int) -> tuple[float, dict[str, float]]:
        seconds = run(num_units)
        return seconds, {"GFLOP/s": flop * batch * num_units / seconds / 1e9}

    return run_and_count, facts


if __name__ == "__main__":
    image_size, batch, num_classes = map(int, sys.argv[2:5])
    main(sys.argv[1], image_size, batch, num_classes, *sys.argv[5:])
