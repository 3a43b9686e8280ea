"""The settings mean and std: what the program, the record, the weights file and an evaluation make of them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open

from loopfeed import evaluate, train
from tests.fake_source import fake_source, pack
from tests.toy import SIZE, Linear, toy_batch, toy_config

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.5)


def loss_of(params, words, labels, mean, std):
    levels = np.stack([words >> 24 & 255, words >> 16 & 255, words >> 8 & 255], -1)
    images = (levels / 255 - np.array(mean)) / np.array(std)
    logits = images.reshape(len(images), -1) @ np.asarray(params["weights"], np.float64) + np.asarray(params["bias"])
    log_sums = np.log(np.exp(logits).sum(-1))
    return np.mean(log_sums - logits[np.arange(len(labels)), labels])


def metadata_of(run):
    with safe_open(run / "model.safetensors", "numpy") as file:
        return {name: tuple(map(float, file.metadata()[name].split())) for name in ("mean", "std")}


@pytest.mark.parametrize(("mean", "std"), [(MEAN, STD), (None, None), (None, STD)])
def test_own_images_are_normalised_as_the_settings_say(tmp_path, mean, std):
    config = toy_config(steps=1, learning_rate=0.0, run_dir=tmp_path, mean=mean, std=std)
    evaluated = toy_batch(7)
    result = train(config, model=Linear(), batches=toy_batch, evaluation=evaluated)
    used = {"mean": mean or (0.5,) * 3, "std": std or (0.25,) * 3}
    expected = loss_of(result.params, *toy_batch(0), **used)
    np.testing.assert_allclose(result.losses[0], expected, rtol=1e-5)  # float32 sums of 48 products
    assert metadata_of(tmp_path) == used
    resolved = json.loads((tmp_path / "config.json").read_text())["resolved"]
    assert {name: tuple(resolved[name]) for name in used} == used
    again = evaluate(tmp_path, model=Linear(), evaluation=evaluated)
    np.testing.assert_allclose(again.record.loss, loss_of(result.params, *evaluated, **used), rtol=1e-5)


def test_packed_images_keep_the_packs_unless_given(tmp_path):
    pack(fake_source(12, size=SIZE), tmp_path / "data")
    manifest = json.loads((tmp_path / "data" / "train" / "manifest.json").read_text())
    config = toy_config(steps=1, data=tmp_path / "data", num_classes=None)
    train(replace(config, run_dir=str(tmp_path / "pack")), model=Linear())
    assert metadata_of(tmp_path / "pack")["mean"] == tuple(manifest["channel_mean"])
    train(replace(config, mean=MEAN, run_dir=str(tmp_path / "given")), model=Linear())
    assert metadata_of(tmp_path / "given") == {"mean": MEAN, "std": metadata_of(tmp_path / "pack")["std"]}
