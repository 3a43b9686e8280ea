"""`open_run`: what a run recorded, as arrays, while it trains and afterwards."""

import shutil
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loopfeed import TrainConfig, evaluate, open_run, read_weights, show_batch, train, unpack_rgb
from tests.fake_source import fake_source, pack
from tests.test_notebook import Slow
from tests.toy import Linear, toy_batch, toy_config

OWN: dict[str, Any] = {"model": Linear(), "batches": toy_batch}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Return the settings of a run on a pack of 12 images, which it trained for 5 steps in two launches."""
    folder = tmp_path_factory.mktemp("packed")
    pack(fake_source(12), folder / "data")
    pack(fake_source(5, seed=1, name="val"), folder / "data")
    config = TrainConfig(
        data=str(folder / "data"), steps=3, batch=4, run_dir=folder / "run", snapshot_every_steps=1, keep_snapshots=9,
        eval_every_steps=2,
    )  # fmt: skip
    train(config, model=Linear())
    train(replace(config, steps=5, resume=True), model=Linear())
    return config


def test_everything_of_a_run_is_there_as_arrays(packed):
    run = open_run(packed.run_dir)
    # A snapshot is left out while the one before it is being written.
    assert (run.status, run.settings.steps, set(run.snapshots) >= {3, 5}) == ("done", 5, True)
    assert run.history.step.tolist() == [1, 2, 3, 4, 5]
    assert [each.step for each in run.evaluations] == [2, 3, 4, 5]
    assert run.resolved["model"] == "linear"
    for snapshot, step in ((None, 5), (3, 3), ("best", None)):
        weights = run.weights(snapshot)  # type: ignore[arg-type]
        assert weights.params["bias"].shape == (3,)
        if step is not None:
            assert weights.batch_stats["batches"] == step
    final = read_weights(f"{packed.run_dir}/model.safetensors")
    np.testing.assert_array_equal(run.weights().params["weights"], final.params["weights"])
    assert repr(run).splitlines()[0] == "run done, step 5 of 5"
    with pytest.raises(ValueError, match=r"no snapshot .*7: choose another step .*3, .*5"):
        run.weights(7)
    with pytest.raises(ValueError, match=r"must be a run folder, but .*/data contains no config\.json"):
        open_run(packed.data)


def test_a_run_in_epochs_that_went_on_shows_its_images_unless_its_pack_has_changed(tmp_path):
    pack(fake_source(12), tmp_path / "data")
    config = TrainConfig(data=str(tmp_path / "data"), epochs=1, batch=4, run_dir=tmp_path / "run", eval_split="off")
    train(config, model=Linear())
    train(replace(config, epochs=2, resume=True), model=Linear())
    run = open_run(tmp_path / "run")
    expected = show_batch(replace(config, run_dir=None, epochs=2), step=5, model=Linear())
    np.testing.assert_array_equal(run.batch(5, model=Linear()).images, expected.images)
    shutil.rmtree(tmp_path / "data")
    pack(fake_source(12, seed=3), tmp_path / "data")
    with pytest.raises(ValueError, match="packed again with other images since: give back the old pack"):
        run.batch(5, model=Linear())


def test_the_images_of_a_step_are_those_that_the_run_took(packed):
    run = open_run(packed.run_dir)
    there = show_batch(replace(packed, steps=6, resume=True), model=Linear())
    train(replace(packed, steps=6, resume=True), model=Linear())
    here = run.batch(6, model=Linear())
    assert (here.step, here.names) == (6, there.names)
    np.testing.assert_array_equal(here.images, there.images)
    assert not np.array_equal(run.batch(1, model=Linear()).images, here.images)
    with pytest.raises(ValueError, match="step must be a step of the run, 1 … 6, got 7"):
        run.batch(7, model=Linear())


def test_the_images_of_own_batches(tmp_path):
    train(toy_config(run_dir=tmp_path / "run", flip=0.0), **OWN)
    shown = open_run(tmp_path / "run").batch(4, **OWN)
    pixels, labels = toy_batch(3)
    np.testing.assert_array_equal(shown.pictures, unpack_rgb(pixels))
    np.testing.assert_array_equal(shown.labels, labels)


def test_mistakes_have_the_names_of_their_images(packed, monkeypatch):
    run = open_run(packed.run_dir)
    found = run.mistakes(model=Linear())
    right = evaluate(packed.run_dir, model=Linear(), predictions=True)
    assert right.predictions is not None
    assert right.num_top1 is not None
    assert len(found) == 5 - right.num_top1 > 0
    assert (found.label != found.predicted).all()
    assert (np.diff(found.probability) <= 0).all()
    assert found.names is not None
    assert right.predictions.names is not None
    assert [right.predictions.names[at] for at in found.index] == [*found.names]
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    assert [*found.frame()] == ["index", "label", "predicted", "probability", "loss", "name"]


def test_a_run_that_trains_is_read_again_and_again(tmp_path):
    handle = train(toy_config(steps=10_000, run_dir=tmp_path / "run"), **(OWN | {"batches": Slow()}), background=True)
    while len(handle.losses) < 3:
        time.sleep(0.01)
    run = open_run(tmp_path / "run")
    before = run.losses
    while len(run.losses) <= len(before):
        time.sleep(0.01)
    assert str(run.status) == "running"
    handle.stop()
    result = handle.result(60)
    np.testing.assert_array_equal(run.losses, result.losses)
    np.testing.assert_array_equal(run.losses[: len(before)], before)
    assert str(run.status) == "stopped"
