"""Steps of a network by a Python loop over a jitted step, as Flax's examples train, or by no loop at all.

"python": batches are put on the device two ahead of the step, the state is donated, and losses are kept as arrays on
the device of which each is read once its step is two behind, so that the dispatch never waits for a result.
"resident": a `lax.fori_loop` over batches that are on the device, which neither reads nor says anything: the limit.
The update is the engine's own default: SGD with momentum and weight decay, behind a clip that clips nothing.
"""

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from protocol import Channel, jax_versions, timed
from small_perceptron import draw_batches, perceptron_of

from loopfeed.engine.images.unpack import PixelScale, unpack_pixels
from loopfeed.engine.objective.losses import cross_entropy
from loopfeed.models.registry import build_model

AHEAD = 2
OPTIMIZER = optax.chain(
    optax.add_decayed_weights(1e-4, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
    optax.sgd(1e-3, momentum=0.9),
)
SCALE = PixelScale(jnp.full(3, 0.5), jnp.full(3, 0.25))


def make_step(model: Any, num_classes: int) -> Callable[..., tuple[Any, jax.Array]]:
    """Return the step: state, pixels and labels → state and loss."""

    def step(state: Any, pixels: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        params, batch_stats, opt_state = state

        def loss_of(params: Any) -> tuple[jax.Array, Any]:
            logits, after = model.apply(params, batch_stats, unpack_pixels(pixels, SCALE), train=True)
            return cross_entropy(logits, jax.nn.one_hot(labels, num_classes)), after

        (loss, after), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), after, opt_state), loss

    return step


def main(kind: str, name: str, precision: str, size: int, batch: int, num_classes: int, *, counts: str) -> None:
    """Serve steps or images."""
    channel = Channel()
    model: Any = perceptron_of(name, size) or build_model(
        name, num_classes=num_classes, image_size=size, dtype=precision
    )
    params, batch_stats = jax.jit(model.init)(jax.random.key(0))
    state: Any = params, batch_stats, OPTIMIZER.init(params)
    batches = draw_batches(size, batch, num_classes)
    num_batches, on_device = len(batches[0]), jax.device_put(batches)

    step = make_step(model, num_classes)
    jitted = jax.jit(step, donate_argnums=0)

    def python(num_units: int) -> None:
        nonlocal state
        ahead: deque[Any] = deque()
        losses: deque[jax.Array] = deque()
        for number in range(num_units + AHEAD):
            if number < num_units:
                ahead.append(jax.device_put(tuple(array[number % num_batches] for array in batches)))
            if number >= AHEAD:
                state, loss = jitted(state, *ahead.popleft())
                loss.copy_to_host_async()
                losses.append(loss)
            if len(losses) > AHEAD:
                float(losses.popleft())
        jax.device_get(list(losses))

    @partial(jax.jit, donate_argnums=0)
    def loop(state: Any, count: jax.Array) -> Any:
        def body(number: jax.Array, state: Any) -> Any:
            return step(state, *(array[number % num_batches] for array in on_device))[0]

        return lax.fori_loop(0, count, body, state)

    def resident(num_units: int) -> None:
        nonlocal state
        state = jax.block_until_ready(loop(state, jnp.int32(num_units)))

    work = {"python": python, "resident": resident}[kind]
    work(8)
    channel.ready(batch if counts == "images" else 1, versions=jax_versions())
    channel.serve(timed(work))


if __name__ == "__main__":
    kind, name, precision, *sizes, counts = sys.argv[1:]
    main(kind, name, precision, *map(int, sizes), counts=counts)
