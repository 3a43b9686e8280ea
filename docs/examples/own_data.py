"""A data source of your own: a function from the step to a batch, nothing on disk."""

import jax
import jax.numpy as jnp
import numpy as np

from loopfeed import TrainConfig, pack_rgb, train

BATCH, SIZE, NUM_CLASSES = 64, 16, 4


# %% The source. It takes the step, from 0, and returns packed pixels uint32 [B, H, W]
# and integer labels [B]. It depends only on the step, so that a resumed run sees the
# batches that an uninterrupted one would have seen.
def batches(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw squares whose brightness tells the class, with noise."""
    random = np.random.default_rng(step)
    labels = random.integers(NUM_CLASSES, size=BATCH)
    rgb = random.integers(0, 128, (BATCH, SIZE, SIZE, 3), dtype=np.uint8)
    rgb += (30 * labels[:, None, None, None]).astype(np.uint8)
    return pack_rgb(rgb), labels


# %% Images to evaluate on: one tuple of all of them, in the same form.
held_out = batches(10**6)


# %% A small model, sufficient for these data.
class Linear:
    """A linear classifier of the mean colour."""

    def init(self, key: jax.Array) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Return (params, batch_stats)."""
        return {
            "kernel": 0.1 * jax.random.normal(key, (3, NUM_CLASSES)),
            "bias": jnp.zeros(NUM_CLASSES),
        }, {}

    def apply(self, params, batch_stats, images, train):  # noqa: ANN001, ANN201, ARG002
        """Return (logits [B, K], batch_stats)."""
        return images.mean((1, 2)) @ params["kernel"] + params["bias"], batch_stats


# %% A sink of your own receives every loss once, in order, on a separate thread.
class Collect:
    """Keep the losses in memory."""

    def open(self) -> None:
        """Begin."""
        self.losses: list[float] = []

    def write(self, record) -> None:  # noqa: ANN001
        """Take one loss."""
        self.losses.append(record.loss)

    def write_evaluation(self, record) -> None:  # noqa: ANN001
        """Take one evaluation."""
        print(f"step {record.step}: top-1 {record.top1:.1%}")

    def close(self) -> None:
        """End."""


# %% Train.
sink = Collect()
config = TrainConfig(
    steps=200, batch=BATCH, learning_rate=1.0, weight_decay=0.0, eval_every_steps=100
)
result = train(
    config, model=Linear(), batches=batches, evaluation=held_out, sinks=[sink]
)

assert sink.losses == [float(loss) for loss in result.losses]
assert [evaluation.step for evaluation in result.evaluations] == [100, 200]
assert result.evaluations[-1].top1 > 0.9
assert result.evaluations[-1].num_images == BATCH

# %% The same settings give the same bits.
assert np.array_equal(
    train(config, model=Linear(), batches=batches, evaluation=held_out).losses,
    result.losses,
)
