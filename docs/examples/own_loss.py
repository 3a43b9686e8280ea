"""Multi-label training with a binary cross-entropy and own metrics."""

from typing import Any

import jax
import numpy as np

from loopfeed import TrainConfig, mean_average_precision, pack_rgb, train

NUM_COLOURS, BATCH, SIZE = 3, 32, 16


def draw_batch(step: int) -> tuple[Any, Any]:
    """Return packed images with up to three coloured squares each, and bits [B, 3]."""
    random = np.random.default_rng(step)
    has_colour = random.random((BATCH, NUM_COLOURS)) < (0.2, 0.4, 0.5)
    images = random.integers(0, 90, (BATCH, SIZE, SIZE, 3)).astype(np.uint8)
    for image, colours in zip(images, has_colour, strict=True):
        for colour in np.flatnonzero(colours):
            top, left = random.integers(0, SIZE - 5, 2)
            image[top : top + 5, left : left + 5, colour] += 120
    return pack_rgb(images), has_colour


def wrong_bits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the fraction of wrong bits of each example, [B]."""
    return ((logits > 0) != labels).mean(axis=1)


parts = [draw_batch(10_000 + part) for part in range(8)]
test_images, test_bits = (np.concatenate(each) for each in zip(*parts, strict=True))

result = train(
    TrainConfig(
        steps=80,
        batch=BATCH,
        model="resnet8",
        num_classes=NUM_COLOURS,
        loss="binary-cross-entropy",
        learning_rate=0.1,
        schedule="cosine",
    ),
    batches=draw_batch,
    evaluation=(test_images, test_bits),
    metrics={"wrong_bits": wrong_bits, "mAP": mean_average_precision(NUM_COLOURS)},
)
evaluated = result.evaluations[-1]

# The best constant prediction is each colour's frequency.
frequency = test_bits.mean(axis=0)
rare, common = np.log(frequency), np.log(1 - frequency)
constant_loss = -(frequency * rare + (1 - frequency) * common).mean()
constant_wrong = np.minimum(frequency, 1 - frequency).mean()
wrong, mean_precision = evaluated.metrics["wrong_bits"], evaluated.metrics["mAP"]
print(f"loss {evaluated.loss:.3f}, constant prediction {constant_loss:.3f}")
print(f"wrong bits {wrong:.1%}, constant prediction {constant_wrong:.1%}")
print(f"mean average precision {mean_precision:.3f}")
assert evaluated.loss < constant_loss / 2
assert wrong < constant_wrong / 2
assert mean_precision > 0.9
