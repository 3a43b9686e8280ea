"""A network so small that what surrounds it is what is measured: 3072 → 64 → 10, on batches of 32 images of 32 px."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BATCH, SIZE, NUM_CLASSES, HIDDEN = 32, 32, 10, 64
NUM_BATCHES = 16


class Perceptron(NamedTuple):
    """Two dense layers, in the form of a model of the engine."""

    name: str = "perceptron"

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Draws the weights."""
        first, second = jax.random.split(key)
        inputs = SIZE * SIZE * 3
        params = {
            "hidden": {"kernel": inputs**-0.5 * jax.random.normal(first, (inputs, HIDDEN)), "bias": jnp.zeros(HIDDEN)},
            "logits": {
                "kernel": HIDDEN**-0.5 * jax.random.normal(second, (HIDDEN, NUM_CLASSES)),
                "bias": jnp.zeros(NUM_CLASSES),
            },
        }
        return params, {}

    def apply(self, params: Any, batch_stats: Any, images: jax.Array, train: bool) -> tuple[jax.Array, Any]:  # noqa: ARG002
        """Gives the logits."""
        flat = images.reshape(len(images), -1)
        hidden = jax.nn.relu(flat @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        return hidden @ params["logits"]["kernel"] + params["logits"]["bias"], batch_stats


def draw_batches() -> tuple[np.ndarray, np.ndarray]:
    """Draws packed pixels uint32 [NUM_BATCHES, BATCH, SIZE, SIZE] and labels int32 [NUM_BATCHES, BATCH]."""
    random = np.random.default_rng(0)
    pixels = random.integers(1 << 32, size=(NUM_BATCHES, BATCH, SIZE, SIZE), dtype=np.uint32) & np.uint32(0xFFFFFF00)
    return pixels, random.integers(NUM_CLASSES, size=(NUM_BATCHES, BATCH), dtype=np.int32)
