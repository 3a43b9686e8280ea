"""A Flax Linen module, trained inside the loop and resumed."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np

from loopfeed import TrainConfig, pack_rgb, train
from loopfeed.engine.adapters import flax_linen

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


class Net(nn.Module):
    """Two convolutions with batch norm, dropout, and a classifier."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Return logits [B, K] for images [B, H, W, 3]."""
        x = nn.Conv(8, (3, 3), strides=2)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.relu(nn.Conv(16, (3, 3), strides=2)(x))
        x = nn.Dropout(0.1, deterministic=not train)(x.max(axis=(1, 2)))
        return nn.Dense(NUM_CLASSES)(x)


# %% The argument `train` of the call is found by its name.
model = flax_linen(Net(), (SIZE, SIZE, 3))

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
run(50, run_dir="runs/flax-linen")
resumed = run(80, run_dir="runs/flax-linen", resume=True)
for one, other in zip(
    jax.tree.leaves((whole.params, whole.batch_stats)),
    jax.tree.leaves((resumed.params, resumed.batch_stats)),
    strict=True,
):
    np.testing.assert_array_equal(one, other)
assert resumed.evaluations[-1].top1 == whole.evaluations[-1].top1
