"""Runs on packs with several classes or numbers per image: equal to a plain loop, resumed, replayed, evaluated."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click.testing import CliRunner

from loopfeed import evaluate, evaluate_weights, predict, read_weights, replay_run, train
from loopfeed.engine.commands.eval_cli import main as run_eval
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.feed.label_form import WEIGHT_WORDS, LabelForm
from loopfeed.engine.feed.order import EpochOrder
from loopfeed.engine.feed.shard_batches import SequentialBatches, ShardBatches
from loopfeed.engine.objective.losses import binary_cross_entropy_loss
from loopfeed.preprocess.pixels import to_rgb
from loopfeed.preprocess.shards import mapped_images
from loopfeed.preprocess.shards.reader import open_split
from loopfeed.preprocess.shards.targets import pack_bits
from tests.fake_source import fake_source, pack
from tests.labelled_photographs import draw_photographs, pack_labelled, read_independently, write_labels
from tests.small_resnets import small_resnets
from tests.toy import BATCH, Linear

LOSSES = {"classes": "binary-cross-entropy", "numbers": "mean-squared-error"}
NUM_IMAGES, STEPS, RATE = 26, 8, 0.05


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """A pack of each kind by its name, beside the file of labels and the photographs."""
    root = tmp_path_factory.mktemp("packs")
    paths = draw_photographs(root / "photographs", NUM_IMAGES)
    for kind in LOSSES:
        labels = write_labels(root / f"{kind}.csv", paths, kind=kind)
        pack_labelled(root / "photographs", labels, root / kind, holdout=0.2)
    return root


@pytest.fixture(autouse=True)
def cached_programs(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "programs"))


def config_of(packs, kind, **values):
    settings = {"steps": STEPS, "batch": BATCH, "learning_rate": RATE, "weight_decay": 0.0, "seed": 3}
    return TrainConfig(**({"data": packs / kind, "loss": LOSSES[kind]} | settings | values))


def images_and_labels(packs, kind, split="train"):
    """Return the images [N, H, W, 3] of a split and the labels that Python's csv reads for them."""
    with open_split(str(packs / kind), split) as opened:
        pixels = np.empty((opened.num_images, opened.height, opened.row_words), np.uint32)
        words = np.empty((opened.num_images, opened.target_words), np.int32)
        opened.read_into(np.arange(opened.num_images), pixels, words, timeout_s=30)
        mean, std = opened.manifest.channel_mean, opened.manifest.channel_std
    expected = read_independently(packs / "photographs", packs / f"{kind}.csv")
    rgb = to_rgb(pixels, "packed")
    return pixels, rgb, np.array([expected[image.tobytes()] for image in rgb], np.float32), mean, std


def mean_loss(kind, outputs, labels):
    if kind == "classes":
        return optax.sigmoid_binary_cross_entropy(outputs, labels).mean()
    return jnp.square(outputs - labels).mean()


def distance(outputs, labels):
    return abs(outputs - labels).sum(axis=1)


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_evaluations_and_metrics_equal_a_plain_loop(packs, kind, tmp_path):
    model, config = Linear(), config_of(packs, kind, momentum=0.9)
    metrics: dict[str, Any] = {"distance": distance}
    params = train(replace(config, steps=0), model=model, metrics=metrics).params
    result = train(replace(config, run_dir=str(tmp_path), eval_every_steps=0), model=model, metrics=metrics)
    _, rgb, labels, mean, std = images_and_labels(packs, kind)
    images = (rgb / 255 - np.array(mean)) / np.array(std)
    optimizer = optax.sgd(RATE, momentum=0.9)
    state, order, losses = optimizer.init(params), EpochOrder(len(images), config.seed), []

    def loss_of(params, images, labels):
        outputs, _ = model.apply(params, {"batches": 0}, images, train=True)
        return mean_loss(kind, outputs, labels)

    gradient_of = jax.jit(jax.value_and_grad(loss_of))
    for step in range(STEPS):
        chosen = order.batch(step, BATCH)
        batch = jnp.asarray(images[chosen], jnp.float32), jnp.asarray(labels[chosen])
        loss, gradient = gradient_of(params, *batch)
        losses.append(loss)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(result.losses, losses, rtol=1e-6)
    _, rgb, labels, _, _ = images_and_labels(packs, kind, "val")
    held_out = jnp.asarray((rgb / 255 - np.array(mean)) / np.array(std), jnp.float32)
    (record,) = result.evaluations
    assert record.num_images == len(rgb) == 5
    assert np.isnan(record.top1)
    np.testing.assert_allclose(record.loss, loss_of(params, held_out, labels), rtol=1e-6)
    outputs, _ = model.apply(params, {"batches": 0}, held_out, train=False)
    np.testing.assert_allclose(record.metrics["distance"], distance(outputs, labels).mean(), rtol=1e-6)
    again = evaluate(tmp_path, model=model, metrics=metrics, snapshot="best").record  # by the loss: top-1 is undefined
    assert (again.loss, again.metrics) == (record.loss, record.metrics)


def test_mixed_images_get_the_mixed_losses_of_batches_of_ones_own(packs):
    kind = "classes"
    config = config_of(packs, kind, mixup=0.4, eval_split="off")
    packed = train(config, model=Linear())
    pixels, _, labels, mean, std = images_and_labels(packs, kind)
    order = EpochOrder(len(pixels), config.seed)

    def batches(step):
        chosen = order.batch(step, BATCH)
        return pixels[chosen], labels[chosen]

    own = train(replace(config, data=None, mean=mean, std=std, num_classes=3), model=Linear(), batches=batches)
    assert np.array_equal(packed.losses, own.losses)


def test_bits_become_zeros_and_ones_in_the_program_and_words_are_as_few_as_possible(packs):
    random = np.random.default_rng(0)
    for num_classes in (1, 32, 70):
        bits = random.random((5, num_classes)) < 0.5
        form = LabelForm.of_targets(num_classes, are_bits=True)
        assert form.num_words == WEIGHT_WORDS + -(-num_classes // 32)
        weights = np.array([1, 1, 0, 1, 1], np.float32)
        words = np.concatenate([weights.view(np.int32)[:, None], pack_bits(bits).view(np.int32)], axis=1)
        labels, found = jax.jit(form.unpack)(words)
        assert labels.dtype == jnp.float32
        assert np.array_equal(labels, bits)
        assert np.array_equal(found, weights)
    with open_split(str(packs / "numbers"), "val") as split:
        source = SequentialBatches(split, batch=4)
        assert source.label_form == LabelForm.of_targets(3, are_bits=False)
        pixels = np.ones((4, split.height, split.row_words), np.uint32)
        words = np.ones((4, 4), np.int32)
        source.fill(1, range(source.batch), pixels, words, timeout_s=10)
        numbers, found = source.label_form.unpack(jnp.asarray(words))
        assert np.array_equal(numbers[:1], split.read_targets(np.array([4])))
        assert np.array_equal(found, [1, 0, 0, 0])
        assert not words[1:].any()
        assert ShardBatches(split, batch=4, seed=0).label_form == source.label_form
    pack(fake_source(4), packs / "plain")
    with open_split(str(packs / "plain"), "train") as split:
        assert ShardBatches(split, batch=4, seed=0).label_form is None


def test_lent_images_come_with_their_targets_and_the_weight_1(packs, monkeypatch):
    monkeypatch.setattr(mapped_images, "_LEAST_ONE_BY_ONE_BYTES", 1)
    with open_split(str(packs / "classes"), "train") as split:
        source = ShardBatches(split, batch=4, seed=0)
        assert source.label_form is not None
        words, filled = np.zeros((2, 4, source.label_form.num_words), np.int32)
        lent = source.lend(3, range(source.batch), words, timeout_s=10)
        assert lent is not None
        pixels = np.empty((4, split.height, split.row_words), np.uint32)
        source.fill(3, range(source.batch), pixels, filled, timeout_s=10)
        assert np.array_equal(words, filled)
        assert np.array_equal(np.stack(list(lent.images)), pixels)
        labels, weights = source.label_form.unpack(jnp.asarray(words))
        assert np.array_equal(labels, split.read_targets(EpochOrder(split.num_images, 0).batch(3, 4)))
        assert np.array_equal(weights, np.ones(4))


KILLED = """
import os, signal, sys
from loopfeed import train
from loopfeed.engine.config import TrainConfig
from tests.toy import Linear
import json
def die(record):
    if record.step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
train(TrainConfig(**json.loads(sys.argv[1])), model=Linear(), sinks=[die])
"""


def outcome(run):
    drop = {"time", "images_per_s", "wait_ms"}
    logs = [
        [
            {key: value for key, value in json.loads(line).items() if key not in drop}
            for line in path.read_text().splitlines()
        ]
        for path in (run / "loss.jsonl", run / "eval.jsonl")
    ]
    return (run / "model.safetensors").read_bytes(), logs


def test_a_killed_run_resumes_to_the_same_bytes_and_verifies(packs, tmp_path):
    values = {"steps": 10, "snapshot_every_steps": 4, "eval_every_steps": 3}
    config = config_of(packs, "classes", **values)
    train(replace(config, run_dir=str(tmp_path / "whole")), model=Linear())
    killed = replace(config, run_dir=str(tmp_path / "killed"))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(killed.to_json())],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "killed/result.json").exists()
    train(replace(killed, resume=True), model=Linear())
    whole, resumed = outcome(tmp_path / "whole"), outcome(tmp_path / "killed")
    assert resumed[0] == whole[0]
    assert resumed[1] == whole[1]
    report = replay_run(tmp_path / "killed", from_step=0, model=Linear())
    assert (report.num_losses, report.num_evaluations, report.differences) == (10, 4, ())


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("classes", {"loss": "cross-entropy"}, r"have any number of classes each, .*: give loss binary-cross-entropy"),
        ("numbers", {"loss": "cross-entropy"}, r"have numbers, not classes, .*: give loss mean-squared-error"),
        ("numbers", {"loss": "binary-cross-entropy"}, r"have numbers outside 0 … 1, .*: give loss mean-squared-error"),
        ("plain", {"loss": "binary-cross-entropy"}, r"have one class each, .*: give loss cross-entropy"),
        ("classes", {"num_classes": 4}, r"num_classes must be 3, the number of classes of each image in .*, got 4"),
        ("numbers", {"num_classes": 2}, r"num_classes must be 3, the number of numbers of each image in .*, got 2"),
        ("classes", {"label_smoothing": 0.1}, r"label_smoothing smooths only the targets of the ready-made cross-"),
        ("classes", {"stop_at_top1": 0.9}, r"stop_at_top1 needs images with one class each, .*, got 0\.9: leave it"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_compiled(packs, kind, settings, message):
    if kind == "plain" and not (packs / "plain").exists():
        pack(fake_source(4), packs / "plain")
    told: list[str] = []
    values = {"loss": "cross-entropy"} if kind == "plain" else {}
    with pytest.raises(ValueError, match=message):
        train(
            config_of(packs, "classes", **{"data": packs / kind, "loss": LOSSES.get(kind)} | values | settings),
            model=Linear(),
            notify=told.append,
        )
    assert not any("compil" in each for each in told)


def test_a_model_with_too_few_logits_is_refused():
    with pytest.raises(
        ValueError, match=r"one logit for each label, but the model returns \[4, 1\] for labels \[4, 3\]"
    ):
        binary_cross_entropy_loss(jnp.zeros((4, 1)), jnp.zeros((4, 3)), jnp.ones(4))


@small_resnets()
def test_the_commands_evaluate_a_run_and_its_weights_and_refuse_what_has_no_meaning(packs, tmp_path, monkeypatch):
    train(config_of(packs, "classes", steps=2, run_dir=str(tmp_path / "run"), model="resnet8", eval_split="off"))
    file = tmp_path / "run/model.safetensors"
    metadata = read_weights(file).metadata
    assert (metadata["targets"], metadata["loss"], metadata["num_classes"]) == ("classes", "binary-cross-entropy", "3")
    assert [each["id"] for each in json.loads(metadata["classes"])] == ["blue", "green", "red"]
    loss = evaluate_weights(file, TrainConfig(data=packs / "classes", batch=BATCH)).record.loss

    def told(*arguments):
        codes: list[int] = []
        monkeypatch.setattr(os, "_exit", codes.append)
        done = CliRunner().invoke(run_eval, [str(each) for each in arguments])
        return codes[0] if codes else done.exit_code, done.output

    code, output = told(tmp_path / "run", "--json")
    assert code == 0
    (line,) = [json.loads(each) for each in output.splitlines() if each.startswith("{")]
    assert (line["loss"], line["top1"], line["num_images"]) == (pytest.approx(loss, rel=1e-6), None, 5)
    code, output = told(tmp_path / "run", "--per-class")
    assert code == 2
    assert "results per class can be returned only for images whose labels are class numbers" in output
    code, output = told(tmp_path / "run", "--predictions", tmp_path / "p.csv")
    assert code == 2
    assert "predictions can be returned only for images whose labels are class numbers" in output
    code, output = told(tmp_path / "run", "--data", packs / "numbers")
    assert code == 2
    assert "have numbers outside 0 … 1, which binary-cross-entropy does not take" in output
    photograph = next((packs / "photographs").glob("*.png"))
    for weights in (tmp_path / "run", file):
        with pytest.raises(ValueError, match="predictions need a model that was trained to choose one class, but"):
            predict(weights, photograph)
