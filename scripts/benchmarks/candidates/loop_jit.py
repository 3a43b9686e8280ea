"""Steps of the same tiny network by a Python loop over a jitted step, as Flax's examples train, or by no loop at all.

"python": batches are put on the device two ahead of the step, the state is donated, and losses are kept as arrays on
the device of which each is read once its step is two behind, so that the dispatch never waits for a result.
"resident": a `lax.while_loop` over batches that are on the device, which neither reads nor says anything: the limit.
The update is the engine's own default: SGD with momentum and weight decay, behind a clip that clips nothing.
"""

import itertools
import sys
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from protocol import Channel, timed
from resident_training import versions
from small_perceptron import NUM_CLASSES, Perceptron, draw_batches

from loopfeed.engine.images.unpack import PixelScale, unpack_pixels
from loopfeed.engine.objective.cross_entropy import cross_entropy

AHEAD = 2
OPTIMIZER = optax.chain(
    optax.add_decayed_weights(1e-4, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
    optax.sgd(1e-3, momentum=0.9),
)
SCALE = PixelScale(jnp.full(3, 0.5), jnp.full(3, 0.25))


def step(model: Perceptron, state: Any, pixels: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
    """Make one update; return the new state and the loss."""
    params, opt_state = state

    def loss_of(params: Any) -> jax.Array:
        logits, _ = model.apply(params, {}, unpack_pixels(pixels, SCALE), train=True)
        return cross_entropy(logits, jax.nn.one_hot(labels, NUM_CLASSES))

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def prefetched(batches: Iterator[Any]) -> Iterator[Any]:
    """Put batches on the device before they are needed."""
    queue: deque[Any] = deque(jax.device_put(batch) for batch in itertools.islice(batches, AHEAD))
    while queue:
        yield queue.popleft()
        queue.extend(jax.device_put(batch) for batch in itertools.islice(batches, 1))


def main(kind: str, size: int, hidden: int) -> None:
    """Serve steps."""
    channel = Channel()
    model = Perceptron(size, hidden)
    params, _ = model.init(jax.random.key(0))
    state: Any = params, OPTIMIZER.init(params)
    pixels, labels = draw_batches(size)
    jitted = jax.jit(partial(step, model), donate_argnums=0)
    on_device = jnp.asarray(pixels), jnp.asarray(labels)

    def python(num_units: int) -> None:
        nonlocal state
        host = ((pixels[number % len(pixels)], labels[number % len(labels)]) for number in range(num_units))
        pending: deque[jax.Array] = deque()
        losses: list[float] = []
        for batch in prefetched(host):
            state, loss = jitted(state, *batch)
            loss.copy_to_host_async()
            pending.append(loss)
            if len(pending) > AHEAD:
                losses.append(float(pending.popleft()))
        losses.extend(map(float, pending))

    @partial(jax.jit, donate_argnums=0)
    def loop(state: Any, count: jax.Array) -> Any:
        def body(number: jax.Array, state: Any) -> Any:
            index = number % len(on_device[0])
            return step(model, state, on_device[0][index], on_device[1][index])[0]

        return lax.fori_loop(0, count, body, state)

    def resident(num_units: int) -> None:
        nonlocal state
        state = jax.block_until_ready(loop(state, jnp.int32(num_units)))

    work = {"python": python, "resident": resident}[kind]
    work(8)
    channel.ready(1, versions=versions())
    channel.serve(timed(work))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
