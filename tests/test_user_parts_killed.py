"""A run with every own part, killed and resumed by its command, ends with the bytes of an uninterrupted one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.toy import Linear, toy_batch

pytestmark = pytest.mark.integration  # whole programs, or large networks

ROOT = Path(__file__).parents[1]
STEPS, KILLED_AT = 30, 17


class Dropping(Linear):
    """The linear toy model with dropout of its pixels."""

    def apply(self, params, batch_stats, images, train, key=None):
        if key is not None:
            kept = jax.vmap(lambda each: jax.random.bernoulli(each, 0.8, images.shape[1:]))(key)
            images = jnp.where(kept, images / 0.8, 0)
        return super().apply(params, batch_stats, images, train)


def batches(step):
    if os.environ.get("KILLED_AT") == str(step):
        time.sleep(2)  # the steps until here are done, and a snapshot of them is written
        os.kill(os.getpid(), signal.SIGKILL)
    return toy_batch(step)


def loss(outputs, labels, weights):
    del weights
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels) + 0.01 * jnp.square(outputs).sum(axis=1)


def schedule(step):
    return optax.cosine_decay_schedule(0.01, STEPS)(step)


def augment(images, keys):
    return images + 0.1 * jax.vmap(lambda key: jax.random.normal(key, images.shape[1:]))(keys)


METRICS = {"largest": lambda outputs, labels: outputs.max(axis=1)}
PARTS = {
    **{"model": "Dropping", "batches": "batches", "loss": "loss", "schedule": "schedule", "augment": "augment"},
    **{"metrics": "METRICS"},
}
OPTIONS = [word for part, name in PARTS.items() for word in (f"--{part}", f"tests.{Path(__file__).stem}:{name}")]
OPTIONS += ["--optimizer", "optax:adabelief"]


def command(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    module = {"run-train": "cli", "verify-run": "verify_cli"}[name]
    code = f"from loopfeed.engine.commands.{module} import main; main()"
    words = [sys.executable, "-c", code, *arguments, *OPTIONS]
    return subprocess.run(words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=240)


@pytest.mark.timeout(300)
def test_a_killed_run_with_every_own_part_ends_like_an_uninterrupted_one(tmp_path):
    settings = ["--steps", str(STEPS), "--batch", "8", "--num-classes", "3", "--snapshot-every", "4"]
    settings += ["--learning-rate", "default"]
    whole, killed = (["--run-dir", str(tmp_path / name)] for name in ("whole", "killed"))
    done = command("run-train", *settings, *whole)
    assert done.returncode == 0, done.stderr
    done = command("run-train", *settings, *killed, KILLED_AT=str(KILLED_AT))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list((tmp_path / "killed/snapshots").iterdir())
    resumed = command("run-train", *killed, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]
    losses = [
        [[json.loads(line)[key] for key in ("step", "loss", "lr", "metrics")] for line in path.read_text().splitlines()]
        for path in (tmp_path / "whole/loss.jsonl", tmp_path / "killed/loss.jsonl")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS
    verified = command("verify-run", str(tmp_path / "killed"), "--from", "0")
    assert verified.returncode == 0, verified.stdout + verified.stderr
