"""Three slow runs, and what the runtime report and the profile say about each."""

import os
import tempfile
import time
from contextlib import contextmanager
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from loopfeed import TrainConfig, convolution, pack_rgb, train

BATCH, SIZE, NUM_CLASSES = 32, 16, 4


# %% Batches, and a network of three stages. Named scopes become rows of the profile.
def batches(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw squares whose brightness tells the class, with noise."""
    random = np.random.default_rng(step)
    labels = random.integers(NUM_CLASSES, size=BATCH)
    rgb = random.integers(0, 128, (BATCH, SIZE, SIZE, 3), dtype=np.uint8)
    rgb += (30 * labels[:, None, None, None]).astype(np.uint8)
    return pack_rgb(rgb), labels


class Network:
    """Three stages of 3×3 convolutions (`repeats` of them), and a linear classifier."""

    def __init__(
        self, repeats: tuple[int, int, int] = (1, 1, 1), width: int = 16
    ) -> None:
        self.repeats, self.width = repeats, width

    def init(self, key: jax.Array) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Return (params, batch_stats)."""
        keys = jax.random.split(key, 1 + sum(self.repeats))
        scale = (2 / (9 * self.width)) ** 0.5
        shape = (3, 3, self.width, self.width)
        params = {
            f"kernel{number}": scale * jax.random.normal(keys[number], shape)
            for number in range(1, len(keys))
        }
        kernel = 0.2 * jax.random.normal(keys[0], (3, 3, 3, self.width))
        head = jnp.zeros((self.width, NUM_CLASSES))
        return params | {"kernel0": kernel, "head": head}, {}

    def apply(self, params, batch_stats, images, train):  # noqa: ANN001, ANN201, ARG002
        """Return (logits [B, K], batch_stats)."""
        features, number = jax.nn.relu(convolution(images, params["kernel0"])), 1
        for stage, repeats in enumerate(self.repeats, start=1):
            with jax.named_scope(f"stage{stage}"):
                for _ in range(repeats):
                    kernel = params[f"kernel{number}"]
                    features = jax.nn.relu(convolution(features, kernel))
                    number += 1
        return features.mean((1, 2)) @ params["head"], batch_stats


# %% A slow source: a pause of 20 ms in each batch. The loop waits for it in every step.
def slow_batches(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch after a pause."""
    time.sleep(0.02)
    return batches(step)


config = TrainConfig(steps=60, batch=BATCH, learning_rate=0.05, profile=True)
result = train(config, model=Network(), batches=slow_batches)
verdict, draw = result.runtime.verdict, result.profile.row("train", "draw")
print(verdict.line)
print(f"draw: {draw.percent:.0f} % of the time, {1e3 * draw.mean_s:.1f} ms a step")
longest = result.runtime.last.stalls[0]
print(f"the longest wait, before step {longest.step}: {longest.wait_s:.3f} s")

assert verdict.bound_by == "source"
assert draw.percent > 30

# %% A slow model: the second stage is six times as long as the others. The device is
# what bounds the run, and the scopes of the profile say which part of the model.
result = train(config, model=Network(repeats=(1, 6, 1), width=32), batches=batches)
verdict = result.runtime.verdict
print(verdict.line)
backward = {row.scope: row for row in result.profile.scopes if row.action == "backward"}
for scope in ("stage1", "stage2", "stage3"):
    print(f"backward, {scope}: {1e3 * backward[scope].mean_s:.2f} ms a step")

assert verdict.bound_by == "device"
assert max(backward, key=lambda scope: backward[scope].mean_s) == "stage2"


# %% A slow disk: one that takes 50 ms to confirm that a file is on it. A snapshot has
# several files, and one after every 20 of these steps is more than the disk can take.
@contextmanager
def slow_disk():  # noqa: ANN201
    """Make every fsync take 50 ms longer."""
    fsync = os.fsync

    def slow_fsync(file: int) -> None:
        time.sleep(0.05)
        fsync(file)

    with patch("os.fsync", slow_fsync):
        yield


with tempfile.TemporaryDirectory() as folder, slow_disk():
    config = TrainConfig(
        steps=60, batch=BATCH, snapshot_every_steps=20, run_dir=f"{folder}/run"
    )
    result = train(config, model=Network(), batches=batches)
print(result.runtime.verdict.line)
seconds = result.runtime.goodput.seconds()
print(f"snapshots: {seconds['snapshots']:.1f} s, steps: {seconds['steps']:.1f} s")

assert result.runtime.verdict.bound_by == "snapshots"
assert seconds["snapshots"] > seconds["steps"]
