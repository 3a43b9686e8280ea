"""An Equinox model, trained inside the loop and resumed."""

from typing import Any

import equinox as eqx
import jax
import numpy as np

from loopfeed import TrainConfig, pack_rgb, train
from loopfeed.engine.adapters import equinox

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


class Net(eqx.Module):
    """Two convolutions with batch norm, dropout, and a classifier."""

    first: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    second: eqx.nn.Conv2d
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(3, 8, 3, stride=2, padding=1, key=keys[0])
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")
        self.second = eqx.nn.Conv2d(8, 16, 3, stride=2, padding=1, key=keys[1])
        self.dropout = eqx.nn.Dropout(0.1)
        self.head = eqx.nn.Linear(16, NUM_CLASSES, key=keys[2])

    def __call__(
        self, image: jax.Array, state: Any, key: Any = None
    ) -> tuple[jax.Array, Any]:
        """Return logits [K] for an image [3, H, W], and the new state."""
        x, state = self.norm(self.first(image), state)
        x = jax.nn.relu(self.second(jax.nn.relu(x)))
        return self.head(self.dropout(x.max(axis=(1, 2)), key=key)), state


# %% `make_with_state(Net)` is a function of a key, so the parameters are drawn from the
# seed of the run. `equinox(net, state)` starts from the parameters of `net`.
model = equinox(eqx.nn.make_with_state(Net))

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
run(50, run_dir="runs/equinox-model")
resumed = run(80, run_dir="runs/equinox-model", resume=True)
for one, other in zip(
    jax.tree.leaves((whole.params, whole.batch_stats)),
    jax.tree.leaves((resumed.params, resumed.batch_stats)),
    strict=True,
):
    np.testing.assert_array_equal(one, other)
assert resumed.evaluations[-1].top1 == whole.evaluations[-1].top1
