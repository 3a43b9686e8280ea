"""Distillation: a small network learns the probabilities that a larger one predicts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopfeed import TrainConfig, build_model, convolution, pack_rgb, train

NUM_CLASSES, BATCH, SIZE, NUM_IMAGES = 4, 32, 16, 2048
TINTS = np.array([[60, 0, 0], [0, 60, 0], [0, 0, 60], [40, 40, 0]])


def draw(count: int, seed: int) -> tuple[Any, Any]:
    """Return noise with a tinted square, uint8 [N, H, W, 3], and its tint."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, NUM_CLASSES, count)
    images = random.integers(0, 120, (count, SIZE, SIZE, 3))
    for image, label in zip(images, labels, strict=True):
        top, left = random.integers(0, SIZE - 6, 2)
        image[top : top + 6, left : left + 6] += TINTS[label]
    return images.astype(np.uint8), labels


# %% The labels of 40 % of the training images are drawn at random.
images, true_labels = draw(NUM_IMAGES, seed=0)
random = np.random.default_rng(1)
is_wrong = random.random(NUM_IMAGES) < 0.4
labels = np.where(is_wrong, random.integers(0, NUM_CLASSES, NUM_IMAGES), true_labels)
test_images, test_labels = draw(512, seed=2)
pixels, evaluation = pack_rgb(images), (pack_rgb(test_images), test_labels)


def batches_of(targets: Any) -> Any:
    """Return a function from the step to a batch of images and their targets."""

    def draw_batch(step: int) -> tuple[Any, Any]:
        chosen = np.random.default_rng(step).integers(0, NUM_IMAGES, BATCH)
        return pixels[chosen], targets[chosen]

    return draw_batch


# %% The teacher learns from these labels.
settings: dict[str, Any] = {
    "batch": BATCH,
    "num_classes": NUM_CLASSES,
    "schedule": "cosine",
}
teacher = train(
    TrainConfig(**settings, steps=160, model="resnet8", learning_rate=0.1),
    batches=batches_of(labels),
    evaluation=evaluation,
)
network = build_model("resnet8", num_classes=NUM_CLASSES, image_size=SIZE)


@jax.jit
def soften(images: jax.Array) -> jax.Array:
    """Return the teacher's probabilities [B, K] for uint8 images [B, H, W, 3]."""
    normalised = (images / 255 - 0.5) / 0.25  # as the program normalises them
    logits, _ = network.apply(
        teacher.params, teacher.batch_stats, normalised, train=False
    )
    return jax.nn.softmax(logits)


targets = np.concatenate([soften(part) for part in np.split(images, 8)])


# %% The student: two convolutions and a classifier.
class Student:
    """A network with 5,168 parameters."""

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Return (params, {})."""
        keys = jax.random.split(key, 3)
        shapes = {"first": (3, 3, 3, 16), "second": (3, 3, 16, 32), "head": (32, 4)}
        return {
            name: jax.nn.initializers.he_normal()(each, shape)
            for each, (name, shape) in zip(keys, shapes.items(), strict=True)
        }, {}

    def apply(
        self, params: Any, batch_stats: Any, images: jax.Array, train: bool
    ) -> tuple[jax.Array, Any]:
        """Return (logits [B, K], batch_stats)."""
        del train  # the student computes the same in evaluations
        x = jax.nn.relu(convolution(images, params["first"], stride=2))
        x = jax.nn.relu(convolution(x, params["second"], stride=2))
        return jnp.max(x, axis=(1, 2)) @ params["head"], batch_stats


def train_student(targets: Any) -> float:
    """Return the student's top-1 accuracy after 240 steps on the targets."""
    config = TrainConfig(**settings, steps=240, optimizer="adamw", learning_rate=0.01)
    result = train(
        config, model=Student(), batches=batches_of(targets), evaluation=evaluation
    )
    return result.evaluations[-1].top1


# %% With distributions `float [B, K]` as labels, the cross entropy is that of
# distillation. The baseline is the same student on the labels, in equal steps.
distilled, scratch = train_student(targets), train_student(labels)
print(f"teacher {teacher.evaluations[-1].top1:.1%}")
print(f"student {distilled:.1%}, trained on the labels {scratch:.1%}")
assert distilled > scratch + 0.02
