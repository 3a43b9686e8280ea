"""A user's loss, labels of any form, and metrics inside the program, against a plain loop."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from loopfeed import TrainConfig, evaluate, replay_run, train
from loopfeed.engine.objective.metrics import Metric, confusion_matrix, mean_of, top_k
from tests.toy import BATCH, SIZE, Linear, toy_batch, toy_config

STEPS = 30
RATE = 0.001


class TwoHeads:
    """A linear network with a head for three bits and one for two numbers."""

    def init(self, key):
        bits, numbers = jax.random.split(key)
        shape = SIZE * SIZE * 3
        return {
            "bits": 0.1 * jax.random.normal(bits, (shape, 3)),
            "numbers": 0.1 * jax.random.normal(numbers, (shape, 2)),
        }, {}

    def apply(self, params, batch_stats, images, train):
        flat = images.reshape(len(images), -1)
        return {name: flat @ params[name] for name in params}, batch_stats


def two_headed_batch(step):
    pixels, labels = toy_batch(step)
    numbers = np.random.default_rng(step).normal(size=(BATCH, 2))
    return pixels, {"bits": labels[:, None] == np.arange(3), "numbers": (numbers + labels[:, None])}


def two_headed_loss(outputs, labels, weights):
    targets = labels["bits"].astype(jnp.float32)
    bits = optax.sigmoid_binary_cross_entropy(outputs["bits"], targets).mean(axis=1)
    return bits + jnp.square(outputs["numbers"] - labels["numbers"]).sum(axis=1)


def wrong_bits(outputs, labels):
    return ((outputs["bits"] > 0) != labels["bits"]).sum(axis=1)


METRICS: dict[str, Any] = {"wrong_bits": wrong_bits}
WRONG_PER_BIT = Metric(
    init=lambda: jnp.zeros(3, jnp.int32),
    update=lambda state, outputs, labels, weights: (
        state + (((outputs["bits"] > 0) != labels["bits"]) & (weights[:, None] > 0)).sum(axis=0)
    ),
    merge=jnp.add,
    finish=lambda state: state,
)


def two_headed_config(**values):
    return toy_config(**({"steps": STEPS, "learning_rate": RATE, "momentum": 0.9, "weight_decay": 0.0} | values))


def run(config, batches=two_headed_batch, **parts):
    return train(config, model=TwoHeads(), batches=batches, loss=two_headed_loss, metrics=METRICS, **parts)


def images_of(pixels):
    levels = jnp.stack([pixels >> shift & 255 for shift in (24, 16, 8)], axis=-1)
    return jnp.asarray((levels / 255 - 0.5) / 0.25, jnp.float32)


def plain_losses(start, steps, batch_of, pulls=1):
    """The losses and metrics of optax in a plain loop over the same batches."""
    optimizer = optax.sgd(RATE, momentum=0.9)
    params, state = start, optimizer.init(start)
    model = TwoHeads()
    losses, wrong = [], []

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def gradient_of(params, pixels, labels):
        outputs, _ = model.apply(params, {}, images_of(pixels), train=True)
        return two_headed_loss(outputs, labels, None).mean(), wrong_bits(outputs, labels).mean()

    for step in range(steps):
        gathered = [gradient_of(params, *batch_of(step * pulls + pull)) for pull in range(pulls)]
        losses.append(np.mean([loss for (loss, _), _ in gathered]))
        wrong.append(np.mean([each for (_, each), _ in gathered]))
        gradients = jax.tree.map(lambda *leaves: sum(leaves) / pulls, *[gradient for _, gradient in gathered])
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return losses, wrong


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("transport", ["inplace", "callback"])
def test_losses_and_metrics_equal_a_plain_loop(tmp_path, transport):
    start = run(two_headed_config(steps=0))
    result = run(two_headed_config(run_dir=tmp_path, transport=transport))
    losses, wrong = plain_losses(start.params, STEPS, two_headed_batch)
    assert losses[-1] < 0.5 * losses[0]
    np.testing.assert_allclose(result.losses, losses, rtol=1e-6)
    found = [line["metrics"]["wrong_bits"] for line in lines(tmp_path / "loss.jsonl")]
    np.testing.assert_allclose(found, wrong, rtol=1e-6)


def test_an_interrupted_run_resumes_to_the_same_bytes(tmp_path):
    pulls, evaluation = 3, two_headed_batch(99)
    config = two_headed_config(steps=9, accumulate_steps=pulls, eval_every_steps=3, snapshot_every_steps=2)
    run(replace(config, run_dir=str(tmp_path / "whole")), evaluation=evaluation)

    def failing(step):
        if step == 5 * pulls + pulls // 2:
            raise ConnectionResetError("cut off")
        return two_headed_batch(step)

    broken = replace(config, run_dir=str(tmp_path / "broken"))
    with pytest.raises(ConnectionResetError):
        run(broken, failing, evaluation=evaluation)
    run(replace(broken, resume=True), evaluation=evaluation)

    def timeless(name):
        drop = {"time", "images_per_s", "wait_ms"}
        return [
            [
                {key: value for key, value in line.items() if key not in drop}
                for line in lines(tmp_path / run_dir / name)
            ]
            for run_dir in ("whole", "broken")
        ]

    for name in ("loss.jsonl", "eval.jsonl"):
        whole, resumed = timeless(name)
        assert whole == resumed
        assert "wrong_bits" in whole[-1]["metrics"]
    weights = [(tmp_path / run_dir / "model.safetensors").read_bytes() for run_dir in ("whole", "broken")]
    assert weights[0][-400:] == weights[1][-400:]


def test_an_evaluation_counts_each_example_once_and_has_no_accuracy_without_classes(tmp_path):
    parts = [two_headed_batch(step) for step in (90, 91)]
    pixels = np.concatenate([part[0] for part in parts])[:13]
    labels = {name: np.concatenate([part[1][name] for part in parts])[:13] for name in ("bits", "numbers")}
    result = run(two_headed_config(steps=2, run_dir=tmp_path), evaluation=(pixels, labels))
    outputs, _ = TwoHeads().apply(result.params, {}, images_of(pixels), train=False)
    labels = jax.tree.map(jnp.asarray, labels)
    (record,) = result.evaluations
    assert record.num_images == 13
    assert np.isnan(record.top1)
    assert np.isnan(record.top5)
    np.testing.assert_allclose(record.loss, two_headed_loss(outputs, labels, None).mean(), rtol=1e-6)
    np.testing.assert_allclose(record.metrics["wrong_bits"], wrong_bits(outputs, labels).mean(), rtol=1e-6)
    (line,) = lines(tmp_path / "eval.jsonl")
    assert line["top1"] is line["top5"] is None
    assert line["metrics"]["wrong_bits"] == pytest.approx(record.metrics["wrong_bits"])


def test_the_default_loss_takes_the_logits_among_other_outputs():
    class WithFeatures(Linear):
        def apply(self, params, batch_stats, images, train):
            logits, batch_stats = super().apply(params, batch_stats, images, train)
            return {"logits": logits, "features": images}, batch_stats

    plain, found = (
        train(toy_config(steps=5), model=model, batches=toy_batch, evaluation=toy_batch(99))
        for model in (Linear(), WithFeatures())
    )
    np.testing.assert_array_equal(found.losses, plain.losses)
    assert found.evaluations[-1].top1 == plain.evaluations[-1].top1


def test_target_distributions_train_like_the_class_numbers_that_they_stand_for():
    def distributions(step):
        pixels, labels = toy_batch(step)
        return pixels, np.eye(3)[labels]

    config = toy_config(steps=20, label_smoothing=0.1, mixup=0.3)
    numbers = train(config, model=Linear(), batches=toy_batch)
    targets = train(config, model=Linear(), batches=distributions)
    assert np.array_equal(numbers.losses, targets.losses)


@pytest.mark.parametrize("name", ["binary-cross-entropy", "mean-squared-error"])
def test_a_ready_made_loss_is_chosen_by_its_name(name):
    def batch(step):
        pixels, labels = toy_batch(step)
        return pixels, (labels[:, None] == np.arange(3)).astype(np.float32)

    model = Linear()
    config = toy_config(steps=20, loss=name, learning_rate=0.05)
    result = train(config, model=model, batches=batch)
    start = train(replace(config, steps=0), model=model, batches=batch).params
    pixels, labels = batch(0)
    logits, _ = model.apply(start, {"batches": 0}, images_of(pixels), train=True)
    one = optax.sigmoid_binary_cross_entropy if name.startswith("binary") else lambda x, y: jnp.square(x - y)
    np.testing.assert_allclose(result.losses[0], one(logits, labels).mean(), rtol=1e-6)
    assert result.losses[-1] < 0.7 * result.losses[0]


@pytest.mark.parametrize(
    ("parts", "settings", "message"),
    [
        ({"loss": 3}, {}, "loss must be a function of .outputs, labels, weights., got int"),
        (
            {"loss": lambda *_: jnp.zeros(())},
            {},
            r"a loss must return floats \[8\], one for each example, but returned float32 \[\]",
        ),
        ({"loss": lambda *_: (jnp.zeros(8), 1)}, {}, r"a loss must return floats \[8\], .* returned a tuple of 2"),
        ({"model": Linear}, {}, r"a model must be an object, got the class (\w+): give \1\(\)$"),
        ({"loss": two_headed_loss}, {"loss": "mean-squared-error"}, "must not be given with a loss of your own"),
        (
            {"loss": two_headed_loss},
            {"label_smoothing": 0.1},
            "smooths only the targets of the ready-made cross-entropy",
        ),
        ({}, {"label_smoothing": 0.1, "loss": "mean-squared-error"}, "smooths only the targets"),
        ({"evaluation": toy_batch}, {}, r"evaluation must be a tuple \(pixels, labels\) .*, got function: give the"),
        ({"evaluation": (1, 2, 3)}, {}, "got a tuple of 3: give the arrays themselves"),
        ({"metrics": [top_k(3)]}, {}, "metrics must be a mapping from names to metrics, got list"),
        ({"metrics": {"top-3": top_k(3)}}, {}, "the name of a metric must be an identifier"),
        ({"metrics": {"top3": 3}}, {}, "the metric top3 must be a Metric or a function"),
        (
            {"metrics": {"first": lambda outputs, labels: outputs[:, 0].mean()}},
            {},
            r"metric first must .* \[8\].* float32 \[\]: do not aver",
        ),
        (
            {"metrics": {"first": lambda outputs, labels: outputs[:, :1]}},
            {},
            r"metric first must return .* but returned float32 \[8, 1\]",
        ),
        ({"metrics": {"first": lambda outputs, labels: outputs}}, {}, r"but returned float32 \[8, 3\]"),
        ({"metrics": {"first": lambda outputs, labels: 1j * outputs[:, 0]}}, {}, r"but returned complex64 \[8\]"),
        ({"metrics": {"first": lambda outputs, labels: None}}, {}, "metric first must return .* but returned None"),
        ({"metrics": {"first": mean_of(lambda outputs, labels: outputs)}}, {}, "a metric must return real numbers"),
        (
            {"metrics": {"big": confusion_matrix(201)}},
            {},
            "at most 40,000 numbers together, got 40,401, of which big has",
        ),
    ],
)
def test_an_unfit_part_is_refused_before_anything_is_compiled(parts, settings, message):
    with pytest.raises(ValueError, match=message):
        train(toy_config(**settings), **({"model": Linear(), "batches": toy_batch} | parts))


def test_a_resume_needs_the_loss_and_the_metrics_again(tmp_path):
    config = two_headed_config(steps=3, run_dir=str(tmp_path))
    run(config)
    longer = TrainConfig(**(config.to_json() | {"steps": 4, "resume": True}))
    with pytest.raises(ValueError, match=r"was trained with a model .*, batches, a loss .* and metrics of your own"):
        train(longer)
    with pytest.raises(ValueError, match=r"must keep its own_parts, which was .*two_headed_loss"):
        train(
            longer,
            model=TwoHeads(),
            batches=two_headed_batch,
            loss=lambda outputs, labels, weights: two_headed_loss(outputs, labels, weights),
            metrics=METRICS,
        )
    assert run(longer).steps_done == 4


def test_a_run_with_own_parts_is_evaluated_and_replayed(tmp_path):
    evaluation = two_headed_batch(99)
    metrics = METRICS | {"wrong_per_bit": WRONG_PER_BIT}
    parts: dict[str, Any] = {"model": TwoHeads(), "evaluation": evaluation, "loss": two_headed_loss}
    config = two_headed_config(steps=4, run_dir=tmp_path, eval_every_steps=3)
    train(config, batches=two_headed_batch, metrics=metrics, **parts)  # whose snapshot is waited for
    result = train(replace(config, steps=6, resume=True), batches=two_headed_batch, metrics=metrics, **parts)
    record = evaluate(tmp_path, metrics=metrics, **parts).record
    assert record.metrics == result.evaluations[-1].metrics
    assert record.loss == result.evaluations[-1].loss
    assert np.shape(record.metrics["wrong_per_bit"]) == (3,)
    with pytest.raises(
        ValueError,
        match=r"was trained with a loss \(.*two_headed_loss\) of your own, which must be given",
    ):
        evaluate(tmp_path, model=TwoHeads(), evaluation=evaluation)
    report = replay_run(tmp_path, batches=two_headed_batch, metrics=metrics, **parts)
    assert (report.num_losses, report.num_evaluations, report.differences) == (2, 1, ())
    whole = replay_run(tmp_path, from_step=0, batches=two_headed_batch, metrics=metrics, **parts)
    assert (whole.num_losses, whole.num_evaluations, whole.differences) == (6, 3, ())  # also at the end of the first
    other = {**metrics, "wrong_bits": lambda outputs, labels: 2 * wrong_bits(outputs, labels)}
    (metric, evaluated) = replay_run(tmp_path, batches=two_headed_batch, metrics=other, **parts).differences
    assert (metric.kind, metric.where) == ("metric", "step 5, wrong_bits")
    assert (evaluated.kind, evaluated.where) == ("evaluation", "step 6, wrong_bits")
    with pytest.raises(ValueError, match=r"was trained with metrics of your own, .* given again: metrics=…$"):
        replay_run(tmp_path, batches=two_headed_batch, **parts)
