"""Reading a run folder back: its content, and folders that are refused."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from loopfeed import run_settings, train
from loopfeed.engine.evaluation.data import data_of_run
from loopfeed.engine.records.digests import sealed
from loopfeed.engine.records.trained_run import read_run
from tests.toy import CLASSES, SIZE, Linear, toy_batch, toy_config


@pytest.fixture
def run(tmp_path):
    train(toy_config(steps=2, run_dir=tmp_path / "run"), model=Linear(), batches=toy_batch)
    return tmp_path / "run"


def test_a_run_is_read_back_wherever_its_folder_is_now(run, tmp_path):
    moved = tmp_path / "moved"
    run.rename(moved)
    recorded = read_run(moved)
    kernels = recorded.config.kernels
    assert recorded.config == run_settings(moved) == toy_config(steps=2, run_dir=moved, kernels=kernels)
    assert (recorded.model_name, recorded.num_classes) == ("linear", CLASSES)
    assert recorded.shape == (SIZE, SIZE)
    data = data_of_run(recorded)
    assert data.manifest_digest is data.eval_manifest_digest is None
    assert recorded.weights.is_of_user_model
    assert recorded.weights.tensors["batch_stats.batches"] == 2
    assert recorded.weights.metadata["steps_done"] == "2"
    np.testing.assert_array_equal([float(part) for part in recorded.weights.metadata["mean"].split()], [0.5] * 3)


def test_a_folder_that_is_not_a_run_is_named(run, tmp_path):
    with pytest.raises(ValueError, match=r"RUN must be a run folder, but .*/nowhere does not exist: give"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.json is a file"):
        read_run(run / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty contains no config\.json"):
        read_run(tmp_path / "empty")
    shutil.copytree(run, tmp_path / "later")
    os.utime(tmp_path / "later/config.json", ns=(2**62, 2**62))
    with pytest.raises(ValueError, match=r"contains 2 run folders; the latest is .*/later"):
        read_run(tmp_path)


def test_a_run_without_weights_has_those_of_its_newest_snapshot(run):
    expected = read_run(run).weights
    assert read_run(run).snapshot_step is None
    (run / "model.safetensors").unlink()
    recorded = read_run(run)
    assert recorded.snapshot_step == 2
    assert recorded.weights.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        np.testing.assert_array_equal(recorded.weights.tensors[name], tensor, strict=True)
    assert recorded.weights.metadata.items() <= expected.metadata.items()
    assert recorded.weights.metadata["steps_done"] == "2"
    shutil.rmtree(run / "snapshots")
    with pytest.raises(ValueError, match=r"must contain model\.safetensors or a snapshot, but .*does not: .* killed"):
        read_run(run)


def test_the_snapshot_to_read_can_be_chosen(tmp_path):
    config = toy_config(steps=2, run_dir=tmp_path / "run", keep_snapshots=0, ema_decay=0.5)
    train(config, model=Linear(), batches=toy_batch)
    early = read_run(tmp_path / "run").weights
    train(replace(config, steps=5, resume=True), model=Linear(), batches=toy_batch)
    for step, expected in ((2, early), (5, read_run(tmp_path / "run").weights)):
        found = read_run(tmp_path / "run", step)
        assert (found.snapshot_step, found.weights.metadata["steps_done"]) == (step, str(step))
        # The moving average, not the current weights.
        assert found.weights.tensors.keys() == expected.tensors.keys()
        for name, tensor in expected.tensors.items():
            np.testing.assert_array_equal(found.weights.tensors[name], tensor, strict=True)
    with pytest.raises(ValueError, match=r"there is no snapshot .*/3: choose another step \(available: 2, 5\)"):
        read_run(tmp_path / "run", 3)


def test_a_damaged_record_is_named(run):
    config = run / "config.json"
    whole = config.read_text()
    config.write_text(whole[:-9])
    with pytest.raises(ValueError, match=r"config\.json cannot be read \("):
        read_run(run)
    recorded = json.loads(whole)
    del recorded["resolved"]["height"]
    config.write_text(json.dumps(recorded))
    with pytest.raises(ValueError, match=r"config\.json has changed since run-train wrote it"):
        read_run(run)
    config.write_text(json.dumps(sealed(recorded)))
    (run / "result.json").unlink()  # it tells of the settings that were there, and so do snapshots
    shutil.rmtree(run / "snapshots", ignore_errors=True)
    with pytest.raises(ValueError, match=r"the resolved settings, but 'height' is missing"):
        read_run(run)
    config.write_text(whole)
    weights = run / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:40])
    with pytest.raises(ValueError, match="must be a complete safetensors file"):
        read_run(run)
