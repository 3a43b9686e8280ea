"""Early stopping: a callback ends the run when the evaluated loss no longer falls."""

import math

import numpy as np

from loopfeed import (
    Callback,
    EvaluationRecord,
    RunHandle,
    TrainConfig,
    TrainResult,
    pack_rgb,
    train,
)

PATIENCE = 3


class EarlyStopping(Callback):
    """Stop the run after `patience` evaluations in a row without a new best loss."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.best_loss, self.best_step, self.num_worse = math.inf, 0, 0

    def on_fit_begin(self, run: RunHandle) -> None:
        """Keep the run, to send it requests."""
        self.run = run

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Count the evaluations since the best one."""
        if record.loss < self.best_loss:
            self.best_loss, self.best_step = record.loss, record.step
            self.num_worse = 0
            return
        self.num_worse += 1
        if self.num_worse == self.patience:
            self.run.request(stop=True)

    def on_end(self, result: TrainResult) -> None:
        """Print what happened."""
        print(f"{result.stopped_by} after {result.steps_done} steps")
        print(f"lowest loss {self.best_loss:.3f} at step {self.best_step}")


# The images do not determine the labels: the network can only memorise them.
random = np.random.default_rng(0)
images = pack_rgb(random.integers(0, 256, (64 + 256, 8, 8, 3), dtype=np.uint8))
labels = random.integers(0, 4, 64 + 256)
train_images, train_labels = (
    images[:64].reshape(2, 32, 8, 8),
    labels[:64].reshape(2, 32),
)

stopping = EarlyStopping(PATIENCE)
result = train(
    TrainConfig(
        steps=50_000,
        batch=32,
        model="resnet8",
        num_classes=4,
        learning_rate=0.05,
        schedule="constant",
        eval_every_steps=20,
    ),
    batches=lambda step: (train_images[step % 2], train_labels[step % 2]),
    evaluation=(images[64:], labels[64:]),
    callbacks=[stopping],
)
assert result.stopped_by == "callback"
assert result.steps_done < 50_000
assert stopping.best_loss == min(evaluation.loss for evaluation in result.evaluations)
assert stopping.num_worse >= PATIENCE
