"""A model and batches that are small enough to run the whole engine in a moment."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from loopfeed.engine.config import TrainConfig

BATCH, SIZE, CLASSES = 8, 4, 3


@dataclass
class Linear:
    """A linear classifier that counts how often it is traced; its batch statistic counts the steps."""

    name: str = "linear"
    traces: list[bool] = field(default_factory=list)

    def init(self, key):
        weights = 0.1 * jax.random.normal(key, (SIZE * SIZE * 3, CLASSES))
        return {"weights": weights, "bias": jnp.zeros(CLASSES)}, {"batches": jnp.zeros(())}

    def apply(self, params, batch_stats, images, train):
        self.traces.append(train)
        flat = images.reshape(len(images), -1)
        return flat @ params["weights"] + params["bias"], {"batches": batch_stats["batches"] + 1}


def toy_batch(step, *, batch=BATCH, seed=0):
    """Return a batch in which the colour shows the class; it depends only on the step and the seed."""
    random = np.random.default_rng([seed, step])
    labels = random.integers(CLASSES, size=batch)
    pixels = random.integers(0, 64, (batch, SIZE, SIZE, 3)).astype(np.uint32)
    pixels[np.arange(batch), :, :, labels] += 150
    words = pixels[..., 0] << 24 | pixels[..., 1] << 16 | pixels[..., 2] << 8
    return words, labels


@dataclass
class CountedBatches:
    """`toy_batch`, with a record of its calls; raises an error at step `raise_at`."""

    raise_at: int = -1
    calls: list[int] = field(default_factory=list)

    def __call__(self, step):
        self.calls.append(step)
        if step == self.raise_at:
            raise ConnectionResetError(f"the camera went away at step {step}")
        return toy_batch(step)


def toy_config(**values) -> TrainConfig:
    return TrainConfig(**({"steps": 5, "batch": BATCH, "num_classes": CLASSES, "learning_rate": 0.1} | values))
