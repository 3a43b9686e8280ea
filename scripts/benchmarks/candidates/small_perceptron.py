"""A network so small that the measurement is of the code around it, on batches of 32 images.

At 32 px with 64 hidden units it still has 25 million multiplications per step; at 8 px, the size of scikit-learn's
digits, with 32 hidden units 0.8 million.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BATCH, NUM_CLASSES, NUM_BATCHES = 32, 10, 16
_NAME = "perceptron-"


class Perceptron(NamedTuple):
    """A model of two dense layers, for images of `size` px, with `hidden` hidden units."""

    size: int
    hidden: int
    num_classes: int = NUM_CLASSES
    name: str = "perceptron"

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Draw the weights."""
        first, second = jax.random.split(key)
        sizes = (self.size**2 * 3, self.hidden, self.num_classes)

        def layer(key: jax.Array, inputs: int, outputs: int) -> Any:
            return {"kernel": inputs**-0.5 * jax.random.normal(key, (inputs, outputs)), "bias": jnp.zeros(outputs)}

        return {"hidden": layer(first, *sizes[:2]), "logits": layer(second, *sizes[1:])}, {}

    def apply(self, params: Any, batch_stats: Any, images: jax.Array, train: bool) -> tuple[jax.Array, Any]:  # noqa: ARG002
        """Return the logits."""
        flat = images.reshape(len(images), -1)
        hidden = jax.nn.relu(flat @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        return hidden @ params["logits"]["kernel"] + params["logits"]["bias"], batch_stats


def perceptron_of(name: str, size: int, num_classes: int = NUM_CLASSES) -> Perceptron | None:
    """Return the model of a name such as "perceptron-64"; None for any other name."""
    return Perceptron(size, int(name.removeprefix(_NAME)), num_classes) if name.startswith(_NAME) else None


def draw_batches(size: int, batch: int, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw packed pixels uint32 [NUM_BATCHES, batch, size, size] and labels int32 [NUM_BATCHES, batch]."""
    random = np.random.default_rng(0)
    pixels = random.integers(1 << 32, size=(NUM_BATCHES, batch, size, size), dtype=np.uint32) & np.uint32(0xFFFFFF00)
    return pixels, random.integers(num_classes, size=(NUM_BATCHES, batch), dtype=np.int32)
