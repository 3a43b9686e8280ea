"""Training of a network of the registry by a Python loop over a jitted step, as in Flax's examples.

Packed batches are put on the device two steps ahead, the state is donated, and each loss is read two steps later, so
that the dispatch never waits for a result. Two batches alternate, so nothing has to be read.
"""

import itertools
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from protocol import Channel, timed
from resident_training import LEARNING_RATE, MOMENTUM, State, versions

from loopfeed.engine.images.unpack import PixelScale, unpack_pixels
from loopfeed.engine.objective.cross_entropy import cross_entropy
from loopfeed.models.registry import build_model

AHEAD = 2
SCALE = PixelScale(jnp.full(3, 0.5), jnp.full(3, 0.25))


def main(name: str, size: int, batch: int, num_classes: int, precision: str) -> None:
    """Serve `batch` images a unit."""
    channel = Channel()
    model = build_model(name, num_classes=num_classes, image_size=size, dtype=precision)
    optimizer = optax.chain(
        optax.add_decayed_weights(1e-4, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
        optax.sgd(LEARNING_RATE, momentum=MOMENTUM),
    )
    params, batch_stats = jax.jit(model.init)(jax.random.key(0))
    state = State(params, batch_stats, optimizer.init(params), jnp.zeros(()))
    random = np.random.default_rng(0)
    pixels = random.integers(2**32, size=(2, batch, size, size), dtype=np.uint32) & np.uint32(0xFFFFFF00)
    labels = random.integers(num_classes, size=(2, batch), dtype=np.int32)

    def step(state: State, pixels: jax.Array, labels: jax.Array) -> State:
        def loss_of(params: Any) -> tuple[jax.Array, Any]:
            logits, batch_stats = model.apply(params, state.batch_stats, unpack_pixels(pixels, SCALE), train=True)
            return cross_entropy(logits, jax.nn.one_hot(labels, num_classes)), batch_stats

        (loss, batch_stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), batch_stats, opt_state, loss)

    train = jax.jit(step, donate_argnums=0)

    def prefetched(batches: Iterator[Any]) -> Iterator[Any]:
        queue: deque[Any] = deque(jax.device_put(each) for each in itertools.islice(batches, AHEAD))
        while queue:
            yield queue.popleft()
            queue.extend(jax.device_put(each) for each in itertools.islice(batches, 1))

    def work(num_units: int) -> None:
        nonlocal state
        pending: deque[jax.Array] = deque()
        for each in prefetched((pixels[number % 2], labels[number % 2]) for number in range(num_units)):
            state = train(state, *each)
            # The state is donated to the next step, so the loss must be copied.
            loss = state.loss + 0
            loss.copy_to_host_async()
            pending.append(loss)
            if len(pending) > AHEAD:
                float(pending.popleft())
        for loss in pending:
            float(loss)

    work(8)
    channel.ready(batch, versions=versions())
    channel.serve(timed(work))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
