"""From settings to source, model and scale, and what does not fit together."""

from contextlib import ExitStack

import pytest

from engine import TrainConfig
from engine.resolve import resolve
from preprocess.journal import PLAN_KEY
from tests.fake_source import fake_source, pack
from tests.toy import Linear, toy_batch, toy_config


def resolved(config, **arguments):
    with ExitStack() as stack:
        return resolve(config, stack, lambda _: None, **arguments)


def test_a_packed_split_gives_size_classes_and_scale(tmp_path):
    done = pack(fake_source(9, size=8), tmp_path)
    found = resolved(TrainConfig(data=tmp_path, batch=4))
    assert (found.model_name, found.num_classes) == ("resnet8", 3)
    assert (found.source.batch, found.source.height, found.source.width) == (4, 8, 8)
    assert (found.mean, found.std) == (done.manifest.channel_mean, done.manifest.channel_std)
    assert len(found.manifest_digest) == 64
    assert found.data == f"{tmp_path}/train, 9 images"


def test_a_split_to_evaluate_on_that_is_not_packed_to_its_end_is_not_left_out(tmp_path):
    pack(fake_source(9, size=8), tmp_path)
    plan = tmp_path / "test" / PLAN_KEY
    plan.parent.mkdir(parents=True)
    plan.write_text("{}")
    with pytest.raises(ValueError, match=r"/test/: the split is not complete.* again, .*; or .*: --eval-split off"):
        resolved(TrainConfig(data=tmp_path, batch=4))
    assert resolved(TrainConfig(data=tmp_path, batch=4, eval_split="off")).evaluation is None
    with pytest.raises(ValueError, match=r"/test/: the split is not complete.*where it stopped$"):
        resolved(TrainConfig(data=tmp_path, batch=4, eval_split="test"))


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        ({"eval_every_steps": 5}, "there is nothing to evaluate on; --eval-every 5 changes nothing"),
        ({"warmup_steps": 10, "steps": 10}, "the warm-up of 10 steps does not end before the run, of 10, does"),
        ({"optimizer": "adamw"}, "the default learning rate of 0.0016 is one for sgd, and adamw"),
        ({"optimizer": "lars"}, None),
        ({"optimizer": "adamw", "learning_rate": 1e-3}, None),
        ({"warmup_steps": 9, "steps": 10}, None),
        ({}, None),
    ],
)
def test_what_is_hardly_meant_is_said(tmp_path, values, warning):
    pack(fake_source(9, size=8), tmp_path)
    told: list[str] = []
    with ExitStack() as stack:
        resolve(TrainConfig(**({"data": tmp_path, "batch": 4, "steps": 10} | values)), stack, told.append)
    warnings = [each for each in told if each.startswith("warning: ")]
    assert len(warnings) == (warning is not None)
    assert warning is None or warning in warnings[0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ("resnet50", 1000, 224)),
        ({"image_size": 127}, ("resnet8", 1000, 127)),
        ({"image_size": 128}, ("resnet50", 1000, 128)),
        ({"image_size": 64, "model": "resnet18", "num_classes": 7}, ("resnet18", 7, 64)),
    ],
)
def test_synthetic_batches_follow_the_settings(values, expected):
    found = resolved(TrainConfig(synthetic=True, batch=2, **values))
    assert (found.model_name, found.num_classes, found.source.height) == expected
    assert found.manifest_digest is None


def test_own_model_and_batches_are_taken_as_they_are():
    model = Linear()
    found = resolved(toy_config(), model=model, batches=toy_batch)
    assert found.model is model
    assert found.data == "batches of your own"


def test_more_classes_than_the_data_has_are_allowed(tmp_path):
    pack(fake_source(9, size=8), tmp_path)
    assert resolved(TrainConfig(data=tmp_path, batch=4, num_classes=1000)).num_classes == 1000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": 9}, "hold the 9 images of the setting batch, the batch source gives 8"),
        ({"num_classes": None}, "num_classes must be given with batches of your own and a model of the registry"),
        ({"image_size": 5}, "image_size must be at most that of the data, 4 × 4 px, got 5"),
        (
            {"stop_at_top1": 0.5},
            r"stop_at_top1 needs images to evaluate on, and there are none with batches of your own, got 0\.5",
        ),
        ({"cycle_momentum": True, "schedule": "cosine"}, "cycle_momentum goes with the schedule one-cycle, got cosine"),
    ],
)
def test_settings_that_do_not_fit_own_batches_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        resolved(toy_config(**values), batches=toy_batch)
