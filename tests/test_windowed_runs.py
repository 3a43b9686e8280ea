"""Runs in the windowed order: what they see, how they resume and replay, and how processes share the windows."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopfeed import replay_run, train
from loopfeed.engine.feed.order import WindowedOrder
from tests.fake_source import fake_source, pack, packed_words
from tests.toy import Linear, toy_batch, toy_config

ROOT = Path(__file__).parents[1]
PROGRAM = "from loopfeed.engine.commands.cli import main; main(prog_name='run-train')"
NUM_IMAGES, BATCH, STEPS, WINDOW = 29, 6, 6, 13
# The images of two windows, and their labels.
WINDOW_GB = 2 * WINDOW * (4 * 4 * 4 + 4) / 1e9


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windowed")
    pack(fake_source(NUM_IMAGES), folder)
    return folder


def config(data, **values) -> Any:
    how = {"order": "windowed", "window_gb": WINDOW_GB, "data": str(data), "eval_split": "off", "batch": BATCH}
    return toy_config(**({"steps": STEPS, "seed": 4, "num_classes": None} | how | values))


@pytest.mark.parametrize("mixup", [0.0, 0.4])
def test_a_run_sees_the_images_of_the_order(data, mixup):
    pixels, labels = packed_words(fake_source(NUM_IMAGES))
    order = WindowedOrder(NUM_IMAGES, 4, BATCH, WINDOW // 8, WINDOW, pairs=mixup > 0)

    def batches(step):
        images = order.images_at(np.arange(step * BATCH, (step + 1) * BATCH))
        return pixels[images], labels[images]

    said: list[str] = []
    scale: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "mixup": mixup}
    expected = train(toy_config(steps=STEPS, seed=4, batch=BATCH, **scale), model=Linear(), batches=batches)
    found = train(config(data, **scale), model=Linear(), notify=said.append)
    np.testing.assert_array_equal(found.losses, expected.losses)
    assert "order: 3 windows of up to 10 images an epoch" in said


def test_a_run_resumes_at_every_step_and_is_replayed(data, tmp_path):
    train(config(data, run_dir=tmp_path / "whole"), model=Linear())
    for step in range(1, STEPS + 1):
        train(config(data, steps=step, run_dir=tmp_path / "parts", resume=step > 1), model=Linear())
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "loss.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS
    assert replay_run(tmp_path / "parts", from_step=4, model=Linear()).is_same
    given = config(data, steps=STEPS + 1, run_dir=tmp_path / "parts", resume=True)
    for name, value, old in (("order", "random", "'windowed'"), ("window_gb", 1.0, WINDOW_GB)):
        with pytest.raises(ValueError, match=f"{name} was {old}, got {value!r}"):
            train(replace(given, **{name: value}), model=Linear())


def test_other_batches_have_no_windows():
    said: list[str] = []
    train(toy_config(steps=1, order="windowed"), model=Linear(), batches=toy_batch, notify=said.append)
    assert "warning: order windowed applies to packed data sets; it has no effect on other batches" in said


def test_damage_ends_the_run_with_the_name_of_the_shard(tmp_path):
    pack(fake_source(NUM_IMAGES), tmp_path)
    path = tmp_path / "train/pixels/c/3/0/0"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with pytest.raises(ValueError, match=r"image 12 \(.+\) in pixels/c/3/0/0: the checksum does not match"):
        train(config(tmp_path), model=Linear())


@pytest.mark.integration
def test_two_processes_see_the_images_of_one_and_are_evaluated_as_often(data, tmp_path):
    """The metrics are 32 bits of a sum over the images and labels of each batch; the cadences are the default ones."""
    pack(fake_source(7, seed=1, name="val"), data)
    device_runs = ["--model", "tests.device_runs:Showing", "--metrics", "tests.device_runs:METRICS"]
    options = [*device_runs, "--data", str(data), "--batch", "12", "--steps", "9"]
    options += ["--learning-rate", "0.05", "--order", "windowed", "--window-gb", str(WINDOW_GB)]
    found = []
    for name, more in (("one", []), ("two", ["--spawn", "2"])):
        words = [sys.executable, "-c", PROGRAM, *options, "--run-dir", str(tmp_path / name), *more]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        losses, evaluations = (
            [json.loads(line) for line in (tmp_path / name / log).read_text().splitlines()]
            for log in ("loss.jsonl", "eval.jsonl")
        )
        found.append([each["metrics"] for each in losses])
        assert [(each["step"], each["num_images"]) for each in evaluations] == [(3, 7), (6, 7), (9, 7)]
    assert found[0] == found[1]
    assert len(found[0]) == 9
