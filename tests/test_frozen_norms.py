"""Norms whose running statistics are frozen: their updates are those of a plain loop, and the rule is recorded."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed import Stage, TrainConfig, replay_run, train
from loopfeed.engine.records.weights import name_tensors
from loopfeed.engine.settings import SettingError
from loopfeed.models.registry import build_model
from tests import lax_resnet8
from tests.small_resnets import small_resnets
from tests.test_initial_weights import saved
from tests.toy import BATCH, CLASSES, toy_batch

RATE = 0.5
SETTINGS: dict[str, Any] = {
    "model": "resnet8", "batch": BATCH, "steps": 3, "learning_rate": RATE, "momentum": 0.0, "weight_decay": 0.0,
    "num_classes": CLASSES, "mean": (0.5,) * 3, "std": (0.25,) * 3,
}  # fmt: skip
RULE = "the normalisation of frozen batch norms"


def given_weights(path, num_classes=CLASSES, model=SETTINGS["model"]):
    """Return weights whose running statistics are not those of the batches of the test, and their file."""
    params, stats = build_model(model, num_classes=num_classes, image_size=4).init(jax.random.key(1))
    random = np.random.default_rng(0)
    stats = jax.tree.map(lambda leaf: jnp.asarray(random.uniform(0.5, 1.5, leaf.shape), jnp.float32), stats)
    return (params, stats), saved(path, name_tensors(model, params, stats))


def plain_loop(params, stats, is_frozen, fixed):
    """Return weights and losses of three updates by gradient descent, without code of the project."""
    losses = []
    for step in range(3):
        pixels, labels = toy_batch(step)
        images = np.stack([(pixels >> shift) & 255 for shift in (24, 16, 8)], -1).astype(np.float32) / 255

        def loss_of(params, stats=stats, images=(images - 0.5) / 0.25, labels=labels):
            logits, moved = lax_resnet8.forward(params, stats, images, fixed)
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean(), moved

        (loss, stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        params = jax.tree_util.tree_map_with_path(
            lambda path, p, g: p if is_frozen(".".join(key.key for key in path)) else p - RATE * g, params, gradients
        )
        losses.append(float(loss))
    return params, stats, losses


@small_resnets()
@pytest.mark.parametrize(
    ("model", "freeze", "is_frozen", "fixed"),
    [
        ("resnet8", r"(?!fc\.).*", lambda path: not path.startswith("fc."), ("bn1",)),
        ("resnet14", "conv1.*,bn1.*", lambda path: path.split(".")[0] in ("conv1", "bn1"), ("bn1",)),
        # The gradients of what is below pass through these norms.
        ("resnet14", "layer1.*", lambda path: path.startswith("layer1"), ("layer1",)),
        ("resnet8", r".*\.(mean|var)", lambda _: False, ("bn1",)),
        # Without the statistics, which move.
        ("resnet8", r"bn1\.(scale|bias)", lambda path: path.startswith("bn1."), ()),
    ],
)
def test_what_is_frozen_normalises_with_its_running_statistics(tmp_path, model, freeze, is_frozen, fixed):
    (params, stats), path = given_weights(tmp_path / "w.safetensors", model=model)
    config = SETTINGS | {"model": model, "init_from": path, "freeze": freeze}
    found = train(TrainConfig(**config), batches=toy_batch)
    *wanted, losses = plain_loop(params, stats, is_frozen, fixed)
    # float32 sums in another order, after three updates of weights of about 1
    np.testing.assert_allclose(found.losses, losses, rtol=2e-5)
    for ours, plain in zip((found.params, found.batch_stats), wanted, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-5), dict(ours), plain)


@small_resnets()
def test_a_run_that_freezes_norms_is_replayed_by_no_other_rule(tmp_path, monkeypatch):
    _, path = given_weights(tmp_path / "w.safetensors")
    config = {**SETTINGS, "init_from": path, "stages": [Stage(until=1), Stage(freeze="bn1.*")]}
    train(TrainConfig(**config, run_dir=tmp_path / "now"), batches=toy_batch)
    assert json.loads((tmp_path / "now/config.json").read_text())["resolved"]["rules"] == {RULE: 2}
    assert replay_run(tmp_path / "now", from_step=0, batches=toy_batch).differences == ()
    with monkeypatch.context() as earlier:
        earlier.setattr("loopfeed.engine.run.descriptions.rules_of", lambda *_: {})
        train(TrainConfig(**config, run_dir=tmp_path / "then"), batches=toy_batch)
    with pytest.raises(ValueError, match=f"{RULE} has changed since .*: then it was by the statistics of each batch"):
        replay_run(tmp_path / "then", from_step=0, batches=toy_batch)


@small_resnets()
def test_a_new_classifier_that_is_frozen_from_the_first_step_is_refused(tmp_path):
    _, path = given_weights(tmp_path / "w.safetensors", num_classes=CLASSES + 1)
    config = {**SETTINGS, "init_from": path}
    frozen = [Stage(until=1, freeze="fc.*"), Stage()]
    for values, where in ({"freeze": "fc.*"}, "freeze: the"), ({"stages": frozen}, "stages, stage 1 of 2: freeze: the"):
        with pytest.raises(SettingError, match=rf"^{where} classifier is new, .* but 'fc\.\*' matches fc\.kernel"):
            train(TrainConfig(**config, **values), batches=toy_batch)
    # Behind a stage in which it learns, it may be frozen.
    train(TrainConfig(**config, stages=[Stage(until=1), Stage(freeze="fc.*")]), batches=toy_batch)
