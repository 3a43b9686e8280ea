"""Evaluation at another image size than training: in the run, after it, and of its weights."""

import json
import os
import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from loopfeed import (
    TrainConfig,
    evaluate,
    evaluate_weights,
    open_split,
    predict,
    read_weights,
    replay_run,
    run_settings,
    train,
)
from loopfeed.engine.commands.eval_cli import main as run_eval
from loopfeed.engine.settings import SettingError
from loopfeed.models.registry import build_model
from loopfeed.preprocess.pixels import unpack_rgb
from tests.fake_source import fake_source, pack
from tests.toy import Linear, toy_batch, toy_config

pytestmark = pytest.mark.usefixtures("small_resnets")

NUM_EVALUATED = 11


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Packed images of 8 px, 20 to train on and 11 to evaluate on."""
    folder = tmp_path_factory.mktemp("data")
    pack(fake_source(20, size=8), folder)
    pack(fake_source(NUM_EVALUATED, size=8, seed=1, name="val"), folder)
    return os.fspath(folder)


@pytest.fixture(scope="module")
def place(data, small_resnets, tmp_path_factory):
    """A run at 4 px that evaluates at 7 px."""
    run = tmp_path_factory.mktemp("runs") / "run"
    return run, train(config_of(data, run, eval_image_size=7))


def config_of(data, run, **values):
    settings: dict[str, Any] = {
        "steps": 4,
        "batch": 4,
        "image_size": 4,
        "crop": "random",
        "model": "resnet8",
        "learning_rate": 0.1,
    }
    return TrainConfig(data=data, run_dir=os.fspath(run), **settings | values)


def numbers(record):
    return record.num_images, record.top1, record.loss


def stored(data):
    with open_split(data, "val") as split:
        pixels, labels = np.zeros((NUM_EVALUATED, 8, 8), np.uint32), np.zeros(NUM_EVALUATED, np.int32)
        split.read_into(np.arange(NUM_EVALUATED), pixels, labels, timeout_s=60)
        return unpack_rgb(pixels), labels


def test_the_network_is_evaluated_on_the_central_pixels_of_that_size(place, data):
    """The centre of 7 of 8 px begins at round(0.5) = 0; the logits are those of the network applied by itself."""
    run, result = place
    rgb, labels = stored(data)
    with open_split(data, "train") as split:
        mean, std = split.manifest.channel_mean, split.manifest.channel_std
    images = (rgb[:, :7, :7] / 255 - mean) / std
    model = build_model("resnet8", num_classes=3, image_size=4)
    apply = jax.jit(partial(model.apply, train=False))
    logits, _ = apply(result.params, result.batch_stats, images.astype(np.float32))
    losses = jax.nn.logsumexp(logits, axis=1) - logits[np.arange(NUM_EVALUATED), labels]
    (found,) = result.evaluations
    assert found.top1 == np.mean(np.argmax(logits, axis=1) == labels)
    np.testing.assert_allclose(found.loss, losses.mean(), rtol=1e-5)  # float32 in another order
    assert read_weights(run / "model.safetensors").metadata["image_size"] == "7x7"
    assert run_settings(run).eval_image_size == 7


def test_all_that_applies_the_network_follows(place, data):
    run, result = place
    (found,) = result.evaluations
    of_run = evaluate(run, predictions=True)
    assert numbers(of_run.record) == numbers(found)
    assert of_run.predictions is not None
    of_file = evaluate_weights(run / "model.safetensors", TrainConfig(data=data, batch=4))
    assert numbers(of_file.record) == numbers(found)
    rgb, _ = stored(data)
    for given in (run, run / "model.safetensors"):
        predicted = predict(given, rgb, top=1, settings={"batch": 4})
        np.testing.assert_array_equal(predicted.labels[:, 0], of_run.predictions.classes[:, 0])
        np.testing.assert_array_equal(predicted.probabilities[:, 0], of_run.predictions.probabilities[:, 0])
    assert replay_run(run).is_same


def test_nothing_else_changes_and_a_given_size_wins(place, data, tmp_path):
    run, result = place
    plain = train(config_of(data, tmp_path / "plain"))
    np.testing.assert_array_equal(plain.losses, result.losses)
    jax.tree.map(np.testing.assert_array_equal, plain.params, result.params)
    (small,), (large,) = plain.evaluations, result.evaluations
    assert small.loss != large.loss
    settings = run_settings(tmp_path / "plain")
    for changed in (replace(settings, image_size=7), replace(settings, eval_image_size=7)):
        assert numbers(evaluate(changed).record) == numbers(large)
    printed = CliRunner().invoke(run_eval, [os.fspath(run), "--image-size", "4", "--json"]).stdout
    assert json.loads(printed)["loss"] == pytest.approx(small.loss, rel=1e-7)  # as it is printed
    images = stored(data)[0]
    of_run = predict(run, images, top=1, settings={"image_size": 4})
    np.testing.assert_array_equal(of_run.probabilities, predict(tmp_path / "plain", images, top=1).probabilities)


def test_a_resume_keeps_the_size(place, data, tmp_path):
    _, result = place
    train(config_of(data, tmp_path / "run", eval_image_size=7, steps=2))
    for size in (8, None):
        with pytest.raises(SettingError, match=f"eval_image_size was 7, got {size}"):
            train(config_of(data, tmp_path / "run", eval_image_size=size, resume=True))
    again = train(config_of(data, tmp_path / "run", eval_image_size=7, resume=True))
    assert numbers(again.evaluations[-1]) == numbers(result.evaluations[-1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eval_image_size": 9}, "eval_image_size must be at most the size of the images, 8 × 8 px, got 9: leave it"),
        (
            {"eval_image_size": 8, "model": "convnext-tiny"},
            "but convnext-tiny does not take 8 × 8 px: images must have at least 32 × 32 px to be divided by 32",
        ),
    ],
)
def test_a_size_that_data_or_network_lack_is_refused_before_anything_compiles(data, tmp_path, values, message):
    lines: list[str] = []
    with pytest.raises(SettingError, match=re.escape(message)):
        train(config_of(data, tmp_path / "run", **values), notify=lines.append)
    assert not [line for line in lines if line.startswith("compiled")]


def test_a_model_of_your_own_is_quoted():
    config = toy_config(image_size=4, eval_image_size=3)
    with pytest.raises(SettingError, match=r"but linear does not take 3 × 3 px: TypeError: dot_general .*Choose anoth"):
        train(config, model=Linear(), batches=toy_batch, evaluation=toy_batch(99))
