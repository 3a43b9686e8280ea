"""Every setting of a training reaches the program: compared with a plain loop or with a run without the setting."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from loopfeed import TrainConfig, train
from loopfeed.engine.run.run import NonFiniteError
from loopfeed.engine.updates.schedules import learning_rate_at, schedule_values
from tests.fake_source import fake_source, pack
from tests.small_resnets import small_resnets
from tests.toy import Linear, toy_batch, toy_config


def rates(run_dir):
    return [json.loads(line)["lr"] for line in (run_dir / "loss.jsonl").read_text().splitlines()]


def test_the_schedule_and_its_warm_up_are_followed(tmp_path):
    config = toy_config(steps=12, schedule="step", warmup_steps=3, learning_rate=0.3, run_dir=tmp_path)
    train(config, model=Linear(), batches=toy_batch)
    values = schedule_values(0.3, 12, warmup_steps=3, milestones=[4, 8, 11])
    rate_at = jax.jit(jax.vmap(partial(learning_rate_at, "step"), (0, None)))
    expected = rate_at(jnp.arange(12), values).tolist()
    np.testing.assert_allclose(rates(tmp_path), expected, rtol=1e-6)
    assert len(set(expected)) > 3


@pytest.mark.parametrize("optimizer", ["lars", "muon"])
def test_optimisers_learn_in_the_loop(optimizer):
    config = toy_config(steps=80, optimizer=optimizer, learning_rate=0.05 if optimizer != "lars" else 20.0)
    losses = train(config, model=Linear(), batches=toy_batch).losses
    assert losses[-10:].mean() < 0.5 * losses[0]


def test_another_rate_length_decay_or_smoothing_compiles_nothing():
    config = toy_config(optimizer="adamw", schedule="cosine", ema_decay=0.9, clip_norm=1.0)
    values: dict[str, Any] = {
        "learning_rate": 0.3,
        "steps": 9,
        "warmup_steps": 2,
        "ema_decay": 0.5,
        "clip_norm": 3.0,
        "label_smoothing": 0.1,
        "weight_decay": 0.3,
        "momentum": 0.5,
        "beta2": 0.9,
        "skip_nonfinite": 4,
        "seed": 9,
    }
    # All at once: one of them that were compiled in would make another program.
    for other in (config, replace(config, **values)):
        found = train(other, model=Linear(), batches=toy_batch)
    assert found.from_cache


def test_the_average_of_the_weights_is_evaluated_and_kept(tmp_path):
    pixels, labels = toy_batch(99)
    settings = {"steps": 30, "learning_rate": 0.02}
    plain = train(toy_config(**settings), model=Linear(), batches=toy_batch, evaluation=(pixels, labels))
    averaged = train(
        toy_config(**settings, ema_decay=0.9, run_dir=tmp_path),
        model=Linear(),
        batches=toy_batch,
        evaluation=(pixels, labels),
    )
    assert np.array_equal(plain.losses, averaged.losses)
    assert not np.array_equal(plain.params["weights"], averaged.params["weights"])
    assert plain.evaluations[0].loss != averaged.evaluations[0].loss
    assert np.array_equal(load_file(tmp_path / "model.safetensors")["params.weights"], averaged.params["weights"])


class Exploding(Linear):
    """Its gradient is no number for a batch whose first pixel is white, 2 after normalisation."""

    def apply(self, params, batch_stats, images, train):
        logits, stats = super().apply(params, batch_stats, images, train)
        return logits * jnp.where(images[0, 0, 0].min() > 1.9, jnp.nan, 1.0), stats


def exploding_at(*steps):
    def batches(step):
        words, labels = toy_batch(step)
        if step + 1 in steps:
            words[0, 0, 0] = 0xFFFFFF00
        return words, labels

    return batches


class Cusped(Linear):
    """Its fourth gradient is no number, and its loss is one."""

    def apply(self, params, batch_stats, images, train):
        logits, stats = super().apply(params, batch_stats, images, train)
        return logits + jnp.sqrt(jnp.where(batch_stats["batches"] == 3, 0 * params["weights"].sum(), 1.0)), stats


def test_the_step_of_a_bad_gradient_is_recorded_though_its_loss_is_a_number(tmp_path):
    with pytest.raises(NonFiniteError, match="NaN or infinite at step 4"):
        train(toy_config(steps=50, run_dir=tmp_path), model=Cusped(), batches=toy_batch)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "loss.jsonl").read_text().splitlines()]
    assert all(map(np.isfinite, losses))
    assert json.loads((tmp_path / "result.json").read_text())["first_nonfinite_step"] == 4


def test_a_nan_gradient_ends_the_run_with_the_last_finite_weights(tmp_path):
    good = train(toy_config(steps=3), model=Exploding(), batches=toy_batch)
    with pytest.raises(NonFiniteError, match=r"NaN or infinite at step 4.*learning_rate"):
        train(toy_config(steps=50, run_dir=tmp_path), model=Exploding(), batches=exploding_at(4))
    assert np.array_equal(load_file(tmp_path / "model.safetensors")["params.weights"], good.params["weights"])
    end = json.loads((tmp_path / "result.json").read_text())
    assert (end["steps_done"], end["stopped_by"], end["first_nonfinite_step"]) == (4, "error", 4)


def test_as_many_bad_updates_in_a_row_as_were_allowed_are_skipped():
    result = train(toy_config(steps=8, skip_nonfinite=1), model=Exploding(), batches=exploding_at(4))
    assert result.steps_done == 8
    assert np.isnan(result.losses[3])
    assert np.isfinite(np.delete(result.losses, 3)).all()
    with pytest.raises(NonFiniteError, match="at step 6, the last of 3 such steps in a row;"):
        train(toy_config(steps=50, skip_nonfinite=2), model=Exploding(), batches=exploding_at(*range(4, 51)))


def test_a_smaller_image_size_crops_and_evaluates_the_centre(tmp_path):
    pack(fake_source(24, size=12), tmp_path)
    pack(fake_source(8, size=12, seed=1, name="val"), tmp_path)
    config = TrainConfig(steps=2, batch=8, data=tmp_path, model="resnet8", image_size=8, crop="random", flip=0.5)
    with small_resnets():
        result = train(replace(config, run_dir=tmp_path / "run"))
    with safe_open(tmp_path / "run/model.safetensors", "np") as file:
        assert file.metadata()["image_size"] == "8x8"
    assert np.isfinite(result.losses).all()
    assert result.evaluations[0].num_images == 8
