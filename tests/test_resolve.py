"""Resolving settings to source, model and scale, and refused combinations."""

import re
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import optax
import pytest

import loopfeed
from loopfeed import TrainConfig
from loopfeed.engine.data.open_data import open_data
from loopfeed.engine.parts import UserParts
from loopfeed.engine.program.train_state import name_of_model
from loopfeed.engine.run.resolve import check_arguments, choose_model, warn_of_settings
from loopfeed.preprocess.shards.location import Location
from tests.fake_source import CLASSES, FakeSource, fake_source, leave_unfinished_split, pack
from tests.toy import toy_batch, toy_config


def resolved(config, *, notify=lambda _: None, is_new=False, **own):
    parts = UserParts(**own)
    check_arguments(config, parts)
    with ExitStack() as stack:
        data = open_data(config, parts, stack, notify, is_new=is_new)
        model = choose_model(config, parts, data)
    return SimpleNamespace(data=data, model=model, model_name=name_of_model(model))


def told_while_resolving(config):
    told: list[str] = []
    resolved(config, notify=told.append)
    return told


def test_a_packed_split_gives_size_classes_and_scale(tmp_path):
    done = pack(fake_source(9, size=8), tmp_path)
    found = resolved(TrainConfig(data=tmp_path, batch=4))
    assert (found.model_name, found.data.num_classes) == ("resnet8", 3)
    assert (found.data.source.batch, found.data.source.height, found.data.source.width) == (4, 8, 8)
    assert (found.data.mean, found.data.std) == (done.manifest.channel_mean, done.manifest.channel_std)
    assert len(found.data.manifest_digest) == 64
    assert found.data.description == f"{tmp_path}/train, 9 images"


@pytest.mark.parametrize(("batch", "num_warnings"), [(9, 0), (10, 1)])
def test_a_batch_larger_than_the_data_causes_a_warning(tmp_path, batch, num_warnings):
    pack(fake_source(9, size=8), tmp_path)
    warnings = [
        each for each in told_while_resolving(TrainConfig(data=tmp_path, batch=batch)) if each.startswith("warning: ")
    ]
    assert warnings == num_warnings * [
        f"warning: a batch has 10 images, but {tmp_path}/train has only 9, so each batch repeats some of them: "
        "choose a batch of 9 or fewer"
    ]


def test_data_of_one_class_cause_a_warning(tmp_path):
    pack(FakeSource(np.zeros((4, 8, 8, 3), np.uint8), [0] * 4, classes=CLASSES[:1]), tmp_path)
    told = told_while_resolving(TrainConfig(data=tmp_path, batch=4))
    assert f"warning: {tmp_path}/train has only one class, so there is nothing to learn" in told


def told_at_the_beginning(config, **own):
    """Return the warnings of a new run."""
    told: list[str] = []
    parts = UserParts(**own)
    with ExitStack() as stack:
        warn_of_settings(config, open_data(config, parts, stack, lambda _: None), told.append)
    return told


@pytest.mark.parametrize("other", [None, "test"])
def test_a_run_does_not_begin_without_a_split_whose_packing_is_not_finished(tmp_path, other):
    pack(fake_source(9, size=8), tmp_path)
    if other is not None:
        pack(fake_source(9, size=8, name=other), tmp_path)
    leave_unfinished_split(tmp_path / "val")
    with pytest.raises(ValueError, match=r"but .*/val is only partly packed: .* --eval-split"):
        told_at_the_beginning(TrainConfig(data=tmp_path, batch=4))
    assert told_at_the_beginning(TrainConfig(data=tmp_path, batch=4, eval_split="off")) == []
    # Nothing of it to a run that goes on.
    found = resolved(TrainConfig(data=tmp_path, batch=4)).data.evaluation
    assert (found is None) == (other is None)


def test_a_store_is_listed_once_to_find_the_split_to_evaluate_on(tmp_path, monkeypatch):
    pack(fake_source(9, size=8), tmp_path)
    listed = []

    def list_keys(location, prefix=""):
        listed.append(prefix)
        names = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
        return sorted(name for name in names if name.startswith(prefix))

    # As a store without folders that can be looked into is listed.
    monkeypatch.setattr(Location, "local_path", None)
    monkeypatch.setattr(Location, "list_keys", list_keys)
    assert told_at_the_beginning(TrainConfig(data=tmp_path, batch=4)) == []
    assert listed == [""]


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        ({"eval_every_steps": 5}, "there is no data to evaluate on; --eval-every 5 has no effect"),
        ({"window_gb": 0.5}, "--window-gb 0.5 has no effect without --order windowed"),
        ({"cache_gb": 20}, "--cache-gb 20 has no effect without --cache"),
        ({"profile_format": "csv"}, "--profile-format csv has no effect without --profile"),
        ({"warmup_steps": 10, "steps": 10}, "the warm-up of 10 steps is at least as long as the run of 10 steps"),
        (
            {"warmup_epochs": 9, "warmup_steps": 21, "steps": 1},
            "the warm-up of 21 steps is at least as long as the run of 1 step: the learning rate stays below its peak; "
            "--warmup-epochs 0 disables the warm-up",
        ),
        ({"optimizer": "adamw"}, "the default learning rate of 0.0016 is meant for sgd; adamw"),
        ({"optimizer": "lamb"}, "the default learning rate of 0.0016 is meant for sgd; lamb"),
        ({"optimizer": "lars"}, None),
        ({"optimizer": "adamw", "learning_rate": 1e-3}, None),
        ({"warmup_steps": 9, "steps": 10}, None),
        ({}, None),
    ],
)
def test_implausible_settings_cause_warnings(tmp_path, values, warning):
    pack(fake_source(9, size=8), tmp_path)
    told = told_at_the_beginning(TrainConfig(**({"data": tmp_path, "batch": 4, "steps": 10} | values)))
    assert len(told) == (warning is not None)
    assert warning is None or told[0].startswith(f"warning: {warning}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": 9}, r"must return batches of 9 images \(the setting batch\), got 8"),
        ({"num_classes": None}, "num_classes is needed to train a built-in model on batches of your own: give it"),
        ({"image_size": 5}, "image_size must be at most the size of the images, 4 × 4 px, got 5"),
        (
            {"stop_at_top1": 0.5},
            r"stop_at_top1 must not be given if the data \(batches of your own\) have no images .*, got 0\.5",
        ),
        ({"cycle_momentum": True, "schedule": "cosine"}, "cycle_momentum needs the one-cycle schedule, got cosine"),
    ],
)
def test_settings_that_do_not_fit_own_batches_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        resolved(toy_config(**values), batches=toy_batch)


def test_a_misspelt_part_is_refused_by_every_function_that_takes_parts() -> None:
    for function in (loopfeed.train, loopfeed.check_step, loopfeed.show_batch, loopfeed.explain_program):
        for name, remedy in {
            "optimiser": "did you mean optimizer?",
            "data": "it is a setting; give it to the configuration, as TrainConfig(data=…)",
            "optim": "did you mean optimizer?",
        }.items():
            wrong: Any = {name: optax.sgd(0.1)}
            with pytest.raises(TypeError, match=f"^unexpected keyword argument '{name}': {re.escape(remedy)}"):
                function(TrainConfig(), **wrong)
