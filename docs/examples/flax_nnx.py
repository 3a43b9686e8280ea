"""A Flax NNX module, trained inside the loop and resumed."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from loopfeed import TrainConfig, pack_rgb, train
from loopfeed.engine.adapters import flax_nnx

NUM_CLASSES, BATCH, SIZE = 4, 32, 16
TINTS = np.array([[90, 0, 0], [0, 90, 0], [0, 0, 90], [60, 60, 0]])


def draw_batch(step: int) -> tuple[Any, Any]:
    """Return packed noise with a tinted square, and the number of the tint."""
    random = np.random.default_rng(step)
    labels = random.integers(0, NUM_CLASSES, BATCH)
    images = random.integers(0, 120, (BATCH, SIZE, SIZE, 3))
    for image, label in zip(images, labels, strict=True):
        top, left = random.integers(0, SIZE - 6, 2)
        image[top : top + 6, left : left + 6] += TINTS[label]
    return pack_rgb(images.astype(np.uint8)), labels


class Net(nnx.Module):
    """Two convolutions with batch norm, dropout, and a classifier."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(16, NUM_CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return logits [B, K] for images [B, H, W, 3]."""
        x = nnx.relu(self.norm(self.first(images)))
        return self.head(self.dropout(nnx.relu(self.second(x)).max(axis=(1, 2))))


# %% The class takes `rngs`, so the parameters are drawn from the seed of the run. A
# module that exists already, `flax_nnx(net)`, starts from its own parameters.
model = flax_nnx(Net)

parts = [draw_batch(10_000 + part) for part in range(8)]
test_images, test_labels = (np.concatenate(each) for each in zip(*parts, strict=True))


def run(steps: int, **settings: Any) -> Any:
    """Train to a number of steps."""
    config = TrainConfig(
        steps=steps,
        batch=BATCH,
        num_classes=NUM_CLASSES,
        optimizer="adamw",
        learning_rate=0.01,
        **settings,
    )
    evaluation = (test_images, test_labels)
    return train(config, model=model, batches=draw_batch, evaluation=evaluation)


whole = run(80)
constant = np.bincount(test_labels).max() / len(test_labels)
print(f"top-1 {whole.evaluations[-1].top1:.1%}, the most frequent class {constant:.1%}")
assert whole.evaluations[-1].top1 > 2 * constant

# %% A run of 50 steps, resumed to 80, ends with the same bits.
run(50, run_dir="runs/flax-nnx")
resumed = run(80, run_dir="runs/flax-nnx", resume=True)
for one, other in zip(
    jax.tree.leaves((whole.params, whole.batch_stats)),
    jax.tree.leaves((resumed.params, resumed.batch_stats)),
    strict=True,
):
    np.testing.assert_array_equal(one, other)
assert resumed.evaluations[-1].top1 == whole.evaluations[-1].top1
