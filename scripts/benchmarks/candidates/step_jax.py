"""A training step in jax on a resident batch, by Loopfeed's layers: N updates in one `lax.while_loop`.

N is a runtime value. The kernels are chosen by name, or are oneDNN's wherever it can be used ("auto"). State is
donated. The update is SGD with momentum, as every candidate makes it; the engine's own also looks whether the gradient
is finite, clips and decays.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from protocol import Channel, jax_versions, timed
from work_of_models import work_of

from loopfeed.engine.objective.losses import cross_entropy
from loopfeed.engine.updates.optim import trace
from loopfeed.models.kernels import ONEDNN, XLA, MissingKernelsError, using_kernels
from loopfeed.models.kernels.onednn.library import load_library
from loopfeed.models.registry import build_model, count_params

LEARNING_RATE, MOMENTUM = 1e-3, 0.9


class State(NamedTuple):
    """The state that a step changes: pytrees, and the loss of the last batch, float32 []."""

    params: Any
    batch_stats: Any
    opt_state: Any
    loss: jax.Array


def make_step(
    name: str, image_size: int, batch: int, num_classes: int, dtype: str
) -> tuple[State, Callable[[State], State]]:
    """Return a fresh state, and the step, for a batch drawn from a fixed seed."""
    model = build_model(name, num_classes=num_classes, image_size=image_size, dtype=dtype)
    params, batch_stats = jax.jit(model.init)(jax.random.key(0))
    random = np.random.default_rng(0)
    images = jnp.asarray(random.standard_normal((batch, image_size, image_size, 3), np.float32))
    targets = jax.nn.one_hot(random.integers(num_classes, size=batch), num_classes)
    moments = trace(jnp.float32(MOMENTUM), nesterov=False, applied=jnp.bool_(True))
    optimizer = optax.chain(moments, optax.scale(-LEARNING_RATE))

    def step(state: State) -> State:
        def loss_of(params: Any) -> tuple[jax.Array, Any]:
            logits, batch_stats = model.apply(params, state.batch_stats, images, train=True)
            return cross_entropy(logits, targets), batch_stats

        (loss, batch_stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), batch_stats, opt_state, loss)

    return State(params, batch_stats, optimizer.init(params), jnp.zeros(())), step


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


def main(kernels: str, dtype: str, name: str, image_size: int, batch: int, num_classes: int) -> None:
    """Serve `batch` images a unit."""
    channel = Channel()
    chosen, library_versions = chosen_kernels(kernels)
    flop = work_of(name, image_size, num_classes).image_flop
    with using_kernels(chosen):
        state, step = make_step(name, image_size, batch, num_classes, dtype)

        @partial(jax.jit, donate_argnums=0)
        def many_steps(state: State, num_steps: jax.Array) -> State:
            def body(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
                return carry[0] + 1, step(carry[1])

            return lax.while_loop(lambda carry: carry[0] < num_steps, body, (jnp.int32(0), state))[1]

        def work(num_units: int) -> None:
            nonlocal state
            state = jax.block_until_ready(many_steps(state, jnp.int32(num_units)))

        work(1)
        run = timed(work)

        def run_and_count(num_units: int) -> tuple[float, dict[str, float]]:
            seconds = run(num_units)
            return seconds, {"GFLOP/s": flop * batch * num_units / seconds / 1e9}

        counted = {"parameters": count_params(state.params), "first loss": round(float(state.loss), 5)}
        facts = counted | {"GFLOP an image": flop / 1e9, "kernels": chosen}
        channel.ready(batch, versions=jax_versions() | library_versions, facts=facts)
        channel.serve(run_and_count)


if __name__ == "__main__":
    kernels, dtype, name, *sizes = sys.argv[1:]
    main(kernels, dtype, name, *map(int, sizes))
