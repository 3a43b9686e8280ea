"""Epochs are converted to steps: exactly, once, and only if there is a data set to count."""

from bisect import bisect_left
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopfeed import TrainConfig, train
from loopfeed.engine.config import MOST_EVALUATIONS, SETTINGS
from loopfeed.engine.parts import UserParts
from loopfeed.engine.run.epochs import describe_cadence, settle_epochs, settle_evaluations, steps_of_epochs
from loopfeed.engine.run.train import set_up_run
from tests.fake_source import fake_source, pack
from tests.toy import BATCH, Linear, toy_batch

NUM_IMAGES = 10


@pytest.mark.parametrize(
    ("epochs", "batch", "accumulate_steps", "steps"),
    [
        (1, 10, 1, 1),
        (1, 4, 1, 3),
        (2, 4, 1, 5),
        (2, 4, 2, 3),
        (0.5, 4, 1, 2),
        (0, 4, 1, 0),
        (1, 128, 1, 1),
        (100, 1, 10, 100),
    ],
)
def test_epochs_are_converted_to_steps(epochs, batch, accumulate_steps, steps):
    config = TrainConfig(epochs=epochs, batch=batch, accumulate_steps=accumulate_steps)
    assert settle_epochs(config, NUM_IMAGES) == replace(config, steps=steps)


def test_a_warm_up_in_epochs_is_converted_with_and_without_epochs():
    config = TrainConfig(epochs=8, warmup_epochs=1.5, batch=4)
    settled = settle_epochs(config, NUM_IMAGES)
    assert (settled.steps, settled.warmup_steps, settled.epochs, settled.warmup_epochs) == (20, 4, 8, 1.5)
    alone = settle_epochs(TrainConfig(steps=7, warmup_epochs=1, batch=4), NUM_IMAGES)
    assert (alone.steps, alone.warmup_steps) == (7, 3)


@given(
    tenths=st.integers(0, 2000),
    num_images=st.integers(1, 2**31),
    images_per_step=st.integers(1, 2**20),
)
def test_steps_are_the_least_that_show_all_images(tenths, num_images, images_per_step):
    steps = steps_of_epochs(tenths / 10, num_images=num_images, images_per_step=images_per_step)
    wanted = Fraction(tenths, 10) * num_images
    assert steps * images_per_step >= wanted
    assert (steps - 1) * images_per_step < wanted


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"epochs": 2, "steps": 7},
            r"^epochs and steps must not both be given, got 2 \(5 steps for 10 images\) and 7: leave one out$",
        ),
        (
            {"warmup_epochs": 1, "warmup_steps": 2},
            r"^warmup_epochs and warmup_steps must not both be given, got 1 \(3 steps for 10 images\) and 2: ",
        ),
        (
            {"epochs": 2.0**31 - 2},
            r"^epochs must be at most 2147483646 steps, got 2\.14748e\+09, which is \d+ steps for 10 images",
        ),
    ],
)
def test_impossible_epochs_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        settle_epochs(TrainConfig(**({"batch": 4} | values)), NUM_IMAGES)


@pytest.mark.parametrize("name", ["epochs", "warmup_epochs"])
def test_the_limit_of_the_counted_setting_is_the_one_that_it_declares(name, monkeypatch):
    counted = name.replace("epochs", "steps")
    limited = dict(SETTINGS) | {counted: replace(SETTINGS[counted], between=(0, 7))}
    monkeypatch.setattr("loopfeed.engine.run.epochs.SETTINGS", limited)
    assert getattr(settle_epochs(TrainConfig.from_json({name: 7, "batch": NUM_IMAGES}), NUM_IMAGES), counted) == 7
    with pytest.raises(
        ValueError, match=rf"^{name} must be at most 7 steps, got 8, which is 8 steps for 10 images: give fewer"
    ):
        settle_epochs(TrainConfig.from_json({name: 8, "batch": NUM_IMAGES}), NUM_IMAGES)


@pytest.mark.parametrize("name", ["epochs", "warmup_epochs", "eval_every_epochs"])
def test_batches_without_an_end_have_no_epochs(name):
    config = TrainConfig.from_json({name: 2.5})
    counted = name.replace("epochs", "steps")
    message = (
        f"^a number of epochs must not be given with %s, which are endless, got {name} 2.5: "
        f"give {counted} as a number of steps$"
    )
    with pytest.raises(ValueError, match=message % "batches of your own"):
        settle_epochs(config, None, "batches of your own")
    with pytest.raises(ValueError, match=message % "synthetic batches"):
        train(replace(config, synthetic=True))
    with pytest.raises(ValueError, match=message % "batches of your own"):
        train(replace(config, batch=BATCH), batches=toy_batch, model=Linear())


def test_a_refused_start_leaves_nothing_behind(tmp_path):
    config = TrainConfig(epochs=2.5, batch=BATCH, run_dir=tmp_path / "runs/first")
    with pytest.raises(ValueError, match="must not be given with batches of your own"):
        train(config, batches=toy_batch, model=Linear())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("num_images", "batch", "steps", "epochs", "every"),
    [
        (1_281_167, 256, 450_411, 5, 25_023),  # 90 epochs of ImageNet: 18 evaluations
        (50_000, 128, 3_907, 1, 391),  # 10 epochs of CIFAR-10
        (50_000, 128, 7_813, 1, 391),  # 20 epochs, and evaluations
        (50_000, 128, 8_204, 2, 782),  # 21 epochs
        (10, 4, 1000, 20, 50),  # 20 epochs of two and a half steps
        (10, 10, 1000, 50, 50),
        (3, 10, 1000, 164, 50),
        (5_000_000, 100, 1000, 1, 50_000),  # less than an epoch: at the end alone
        (10, 4, 0, 1, 3),
    ],
)
def test_by_default_a_run_is_evaluated_each_epoch_or_twenty_times(num_images, batch, steps, epochs, every):
    config = settle_evaluations(TrainConfig(steps=steps, batch=batch), num_images, is_evaluated=True)
    assert config == TrainConfig(steps=steps, batch=batch, eval_every_steps=every)
    said = describe_cadence(config, TrainConfig(), num_images, is_evaluated=True, has_folder=False)
    assert said == f"cadence: an evaluation every {'epoch' if epochs == 1 else f'{epochs} epochs'} ({every:,} steps)"
    assert len({*range(every, steps + 1, every), steps}) <= MOST_EVALUATIONS
    # Computed again from the record, also of a longer run, it is the same.
    assert settle_epochs(config, num_images) == config
    longer = replace(config, steps=100 * steps)
    assert settle_evaluations(settle_epochs(longer, num_images), num_images, is_evaluated=True) == longer


@given(
    num_images=st.integers(1, 2**31 - 2),
    batch=st.integers(1, 2**10),
    accumulate=st.integers(1, 4),
    steps=st.integers(1, 10**6),
)
def test_the_default_cadence_is_the_least_number_of_epochs_that_is_allowed(num_images, batch, accumulate, steps):
    config = TrainConfig(steps=steps, batch=batch, accumulate_steps=accumulate)
    settled = settle_evaluations(config, num_images, is_evaluated=True)
    every = settled.eval_every_steps
    assert every is not None
    assert -(-steps // every) <= MOST_EVALUATIONS
    steps_of = partial(steps_of_epochs, num_images=num_images, images_per_step=batch * accumulate)
    epochs = 1 + bisect_left(range(1, 2**40), every, key=steps_of)
    assert steps_of(epochs) == every
    if epochs > 1:
        assert -(-steps // steps_of(epochs - 1)) > MOST_EVALUATIONS


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"steps": 1000, "batch": 128},
            ["1,000 steps of 128 images are 1,910 epochs of the 67;"],
        ),
        ({"steps": 150, "batch": 128}, []),
        ({"epochs": 400, "batch": 64}, []),
    ],
)
def test_many_epochs_are_told_if_only_the_steps_are_given(values, said):
    told: list[str] = []
    settle_epochs(TrainConfig(**values), 67, notify=told.append)
    settle_epochs(TrainConfig(resume=True, run_dir="run", **values), 67, notify=told.append)
    rest = " --epochs counts in epochs"
    assert [each.removeprefix("steps: ").removesuffix(rest) for each in told if each.startswith("steps")] == said


def test_every_cadence_can_be_in_epochs():
    given: dict[str, Any] = {
        **{"eval_every_steps": "1e", "snapshot_every_steps": "0.5e", "warmup_steps": "0.3e", "steps": "6e"},
        **{"histogram_every_steps": "2e", "log_images_every_steps": "3e"},
    }
    settled = settle_epochs(TrainConfig(batch=4, **given), NUM_IMAGES)
    counts = [getattr(settled, name) for name in given]
    assert counts == [3, 2, 1, 15, 5, 8]
    assert settle_epochs(TrainConfig.from_json(settled.to_json()), NUM_IMAGES) == settled


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "a snapshot every 10 minutes"),
        ({"eval_every_steps": "1e"}, "an evaluation every epoch (3 steps), a snapshot every 10 minutes"),
        (
            {"eval_every_steps": "0.5e", "snapshot_every_steps": "2e"},
            "an evaluation every 0.5 epochs (2 steps), a snapshot every 2 epochs (5 steps)",
        ),
        ({"keep_best": "top1"}, "a snapshot after each evaluation that is the best so far, and every 10 minutes"),
        ({"keep_best": "top1", "snapshot_every_steps": 4, "eval_every_steps": 2}, None),
    ],
)
def test_the_cadence_is_named_unless_it_was_given_in_steps(values, message):
    given = TrainConfig(batch=4, **values)
    config = settle_epochs(given, NUM_IMAGES)
    said = describe_cadence(config, given, NUM_IMAGES, is_evaluated=True, has_folder=True)
    assert said == (None if message is None else f"cadence: {message}")


def test_a_demo_set_that_is_not_there_yet_is_made_before_it_is_counted(tmp_path, monkeypatch):
    made: list[str] = []

    def make_demo(folder, notify):
        made.append(str(folder))
        pack(fake_source(10), folder)

    demo = tmp_path / "cache/loopfeed/demo"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("loopfeed.engine.data.open_data.make_demo", make_demo)
    said: list[str] = []
    with set_up_run(TrainConfig(epochs=1, batch=5), UserParts(model=Linear()), said.append, is_dry=True) as run:
        assert run.config.steps == 2
    assert made == [str(demo)]
    assert "epochs: 1 of 10 images each, 2 steps in total" in said
