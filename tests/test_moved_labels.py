"""Labels that an augmentation would have to move with the pixels are refused, until the caller says otherwise."""

import json
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed.engine.config import SettingError
from loopfeed.engine.data.label_fit import check_labels_stay
from loopfeed.engine.evaluation.run import evaluate
from loopfeed.engine.feed.label_form import LabelForm
from loopfeed.engine.records.digests import SEAL
from loopfeed.engine.records.recorded_run import read_recorded
from loopfeed.engine.records.run_folder import CONFIG, CONTINUED
from loopfeed.engine.run.train import train
from tests.toy import BATCH, SIZE, toy_batch, toy_config

MOVING: dict[str, dict[str, Any]] = {
    "flip": {"flip": 0.5},
    "crop": {"crop": "random", "crop_padding": 1},
    "mixup": {"mixup": 0.2},
    "cutmix": {"cutmix": 1.0},
    "auto_augment": {"auto_augment": "trivialaugment"},
    "eval_mirror": {"eval_mirror": True},
}


@dataclass
class PerPixel:
    """A model with one output for each pixel."""

    name: str = "per-pixel"

    def init(self, key):
        return {"scale": jnp.ones(3)}, {}

    def apply(self, params, batch_stats, images, train):
        return images @ params["scale"], batch_stats


def masks(step):
    words, _ = toy_batch(step)
    return words, (words >> 24 > 100).astype(np.float32)


def squared(outputs, labels, weights):
    return jnp.mean((outputs - labels) ** 2, axis=(1, 2))


def train_on_masks(**values):
    config = toy_config(steps=1, num_classes=None, **values)
    return train(config, model=PerPixel(), batches=masks, loss=squared)


@pytest.mark.parametrize("name", MOVING)
def test_masks_are_refused_with_each_setting_that_moves_pixels(name):
    with pytest.raises(SettingError, match=rf"labels is float32 \[{SIZE}, {SIZE}\] of each image could be") as caught:
        train_on_masks(**MOVING[name])
    assert caught.value.setting == name
    assert f"leave out {name} or, if that leaves the labels true, say so with labels_are_invariant" in str(caught.value)


def test_all_settings_are_named_at_once_and_what_only_changes_colours_passes():
    with pytest.raises(SettingError, match="leave out crop, flip and mixup or"):
        train_on_masks(**MOVING["mixup"], **MOVING["flip"], **MOVING["crop"])
    train_on_masks(brightness=0.2, hue=0.1, erasing=0.3)


def test_a_caller_may_say_that_labels_are_invariant_and_the_run_records_it(tmp_path):
    run = tmp_path / "run"
    train_on_masks(flip=1.0, labels_are_invariant=True, run_dir=run)
    assert read_recorded(run).config.labels_are_invariant
    train(
        toy_config(steps=2, num_classes=None, flip=1.0, labels_are_invariant=True, run_dir=run, resume=True),
        model=PerPixel(), batches=masks, loss=squared,
    )  # fmt: skip
    changed = toy_config(num_classes=None, run_dir=run, eval_mirror=True)
    with pytest.raises(SettingError, match="leave out eval_mirror or"):
        evaluate(changed, model=PerPixel(), evaluation=masks(0), loss=squared)


def test_a_run_of_an_earlier_version_goes_on_as_it_was(tmp_path):
    train_on_masks(flip=1.0, labels_are_invariant=True, run_dir=tmp_path)
    values = json.loads((tmp_path / CONFIG).read_text())
    values = {key: each for key, each in values.items() if key not in (SEAL, CONTINUED)}
    del values["config"]["labels_are_invariant"]
    (tmp_path / CONFIG).write_text(json.dumps(values))
    assert read_recorded(tmp_path).config.labels_are_invariant
    del values["resolved"]["labels"]
    (tmp_path / CONFIG).write_text(json.dumps(values))
    assert not read_recorded(tmp_path).config.labels_are_invariant


@pytest.mark.parametrize(
    ("labels", "columns", "is_refused"),
    [
        (np.zeros((BATCH, 2, 4), np.float32), (), True),
        ({"kind": np.zeros(BATCH, np.int32), "mask": np.zeros((BATCH, 3, 3), bool)}, (), True),
        ({"boxes": np.zeros((BATCH, 4), np.float32)}, (), True),
        ({"keypoints": np.zeros((BATCH, 8), np.int32)}, (), True),
        (np.zeros((BATCH, 4), np.float32), ("x1", "y1", "x2", "y2"), True),
        (np.zeros((BATCH, 2), np.float32), ("nose_x", "nose_y"), True),
        (np.zeros((BATCH, 2), np.float32), ("age", "weight"), False),
        (np.zeros((BATCH, 5), np.float32), (), False),
        (np.zeros((BATCH, 1, 1), np.float32), (), False),
        (np.zeros(BATCH, np.int32), (), False),
    ],
)
def test_what_could_be_a_position_is_refused(labels, columns, is_refused):
    form, config = LabelForm.of(labels, BATCH, "the test"), toy_config(flip=0.5)
    if is_refused:
        with pytest.raises(SettingError, match="could be a position: leave out flip or"):
            check_labels_stay(config, form, columns)
    else:
        check_labels_stay(config, form, columns)


def test_numbers_without_names_are_doubted_in_one_line():
    told: list[str] = []

    def batches(step):
        words, labels = toy_batch(step)
        return words, np.stack([labels, labels], 1).astype(np.float32)

    for values, count in (({}, 1), ({"labels_are_invariant": True}, 0), ({"flip": 0.0}, 0)):
        told.clear()
        train(
            toy_config(steps=0, loss="mean-squared-error", **({"flip": 0.5} | values)),
            model=Pair(), batches=batches, notify=told.append,
        )  # fmt: skip
        assert sum("if these numbers are positions" in each for each in told) == count


@dataclass
class Pair:
    """A model with two outputs."""

    name: str = "pair"

    def init(self, key):
        return {"scale": jnp.ones((3, 2))}, {}

    def apply(self, params, batch_stats, images, train):
        return images.mean((1, 2)) @ params["scale"], batch_stats
