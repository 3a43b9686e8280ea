"""Precedence of the sources of settings, and the record of which one won."""

from dataclasses import fields
from typing import Any, cast

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.engine.commands.cli import main as run_train
from loopfeed.engine.commands.command_end import describe_error
from loopfeed.engine.commands.eval_cli import main as run_eval
from loopfeed.engine.commands.option_sources import (
    OptionalNumber,
    OptionSource,
    command_line,
    merge_options,
)
from loopfeed.engine.commands.setting_options import option_names, setting_option
from loopfeed.engine.config import PrecisionName, TrainConfig
from loopfeed.engine.images.settings import Augmentation
from loopfeed.engine.run.changes import check_settings
from loopfeed.engine.settings import SettingError

NAMES = [field.name for field in fields(TrainConfig)]
FREE = ["batch", "momentum", "seed", "flip", "mixup"]  # of no pair
SETTINGS = st.dictionaries(st.sampled_from(FREE), st.integers(0, 3))


@click.command()
@click.option("--steps", type=int, default=1000)
@click.option("--epochs", type=OptionalNumber(click.FLOAT))
@click.option("--num-classes", type=OptionalNumber(click.INT))
@click.option("--batch", type=int, default=128, envvar="TEST_BATCH")
@click.option("--decay-all/--no-decay-all", default=False)
@click.option("--dry-run", is_flag=True)
def command(**options: Any) -> None:
    """Accept settings, and one option that is not a setting."""


def given_by(*arguments: str) -> dict[str, Any]:
    return dict(command_line(command.make_context("command", list(arguments))).settings)


def test_only_given_options_count_in_any_order():
    assert given_by() == {}
    assert given_by("--dry-run") == {}
    assert given_by("--batch", "128", "--no-decay-all") == {"batch": 128, "decay_all": False}
    assert given_by("--no-decay-all", "--batch", "128") == {"batch": 128, "decay_all": False}


def test_epochs_and_steps_together_are_refused():
    with pytest.raises(SettingError, match=r"^epochs and steps must not both be given, got ") as raised:
        given_by("--steps", "10", "--epochs", "2.5")
    words = raised.value.render(lambda name: f"--{name}")
    assert words == "epochs and steps must not both be given, got --epochs 2.5 and --steps 10: leave one out"
    assert given_by("--steps", "10", "--epochs", "default") == {"steps": 10, "epochs": None}


def test_steps_can_be_given_in_epochs():
    counted = click.Command("command")
    setting_option("steps")(counted)
    for text, given_here in (("2.5e", {"epochs": 2.5}), ("7", {"steps": 7})):
        assert command_line(counted.make_context("command", ["--steps", text])).settings == given_here
    merged = merge_options(
        OptionSource("recipe x", {"eval_every_steps": 5}), OptionSource("y", {"eval_every_epochs": 1.0})
    )
    assert merged.settings == {"eval_every_epochs": 1.0}
    result = CliRunner().invoke(counted, ["--steps", "1x"])
    assert "'1x' is not a valid integer, nor a number of epochs such as 1e or 0.5e." in result.stderr


@pytest.mark.parametrize(("option", "kind"), [("--epochs", "float"), ("--num-classes", "integer")])
def test_anything_but_a_number_or_default_is_wrong_usage(option, kind):
    result = CliRunner().invoke(command, [option, "1,5"])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}': '1,5' is not a valid {kind}." in result.stderr


@given(st.lists(SETTINGS, max_size=4))
def test_the_last_source_that_gives_a_setting_decides(sources):
    merged = merge_options(*(OptionSource(f"source {place}", given) for place, given in enumerate(sources)))
    expected: dict[str, Any] = {}
    for given_here in sources:
        expected |= given_here
    assert merged.settings == expected
    assert list(merged.origins) == NAMES
    for name, origin in merged.origins.items():
        givers = [place for place, given_here in enumerate(sources) if name in given_here]
        assert origin == (f"source {givers[-1]}" if givers else "default")


def test_changes_are_described():
    recipe = OptionSource("recipe x", {"batch": 256, "learning_rate": 0.1, "model": "resnet50", "flip": 0.5})
    merged = merge_options(
        recipe, OptionSource("command line", {"batch": 1024, "learning_rate": None, "flip": 0.5, "mixup": 0.2})
    )
    assert merged.overrides == ("batch 256 → 1024", "learning_rate 0.1 → default")
    assert {name: origin for name, origin in merged.origins.items() if origin != "default"} == {
        "batch": "command line",
        "learning_rate": "command line",
        "model": "recipe x",
        "flip": "command line",
        "mixup": "command line",
    }


@pytest.mark.parametrize(
    ("base", "given_later", "settings", "overrides"),
    [
        ({"epochs": 90}, {"steps": 100}, {"steps": 100}, ("epochs 90 → steps 100",)),
        ({"steps": 100}, {"epochs": 9.0}, {"epochs": 9.0}, ("steps 100 → epochs 9",)),
        ({"epochs": 90}, {"epochs": 9}, {"epochs": 9}, ("epochs 90 → 9",)),
        ({"epochs": 90, "steps": 450_411}, {"batch": 8}, {"epochs": 90, "batch": 8}, ()),
        ({"epochs": None, "steps": 100}, {}, {"steps": 100}, ()),
        ({"epochs": None, "steps": 100}, {"epochs": 2}, {"epochs": 2}, ("steps 100 → epochs 2",)),
        ({"epochs": 90}, {"epochs": None}, {"epochs": None}, ("epochs 90 → default",)),
        ({"warmup_epochs": 5}, {"warmup_steps": 3}, {"warmup_steps": 3}, ("warmup_epochs 5 → warmup_steps 3",)),
        (
            {"epochs": 90, "warmup_epochs": 5},
            {"steps": 3},
            {"steps": 3, "warmup_epochs": 5},
            ("epochs 90 → steps 3",),
        ),
    ],
)
def test_epochs_and_steps_displace_each_other(base, given_later, settings, overrides):
    merged = merge_options(OptionSource("base", base), OptionSource("later", given_later))
    assert merged.settings == settings
    assert merged.overrides == overrides
    for pair in (("epochs", "steps"), ("warmup_epochs", "warmup_steps")):
        if any(given_later.get(name) is not None for name in pair):
            assert {merged.origins[name] for name in pair} == {"later"}
        elif any(base.get(name) is not None for name in pair) and not any(name in given_later for name in pair):
            assert {merged.origins[name] for name in pair} == {"base"}


def test_the_source_that_overrides_epochs_decides_the_steps():
    taken_away = OptionSource("command line", {"epochs": None})
    recipe = merge_options(OptionSource("recipe x", {"epochs": 90}), taken_away)
    assert (recipe.origins["epochs"], recipe.origins["steps"]) == ("command line", "command line")
    counted = merge_options(OptionSource("recipe x", {"steps": 90}), taken_away)
    assert (counted.settings["steps"], counted.origins["steps"]) == (90, "recipe x")
    assert merge_options(taken_away).origins["steps"] == "default"


def test_a_recorded_run_is_read_back_unchanged():
    config = TrainConfig(steps=7, batch=4, learning_rate=0.5, decay_all=True)
    merged = merge_options(OptionSource("the recorded run", config.to_json()))
    assert TrainConfig.from_json(merged.settings) == config
    assert set(merged.origins.values()) == {"the recorded run"}


@pytest.mark.parametrize(
    ("error", "in_python", "on_the_command_line"),
    [
        (
            lambda: TrainConfig(chunk_batches=0),
            "chunk_batches must lie in 1 … 1024, got 0",
            "--chunk must lie in 1 … 1024, got 0",
        ),
        (
            lambda: Augmentation(crop_padding=4),
            "crop_padding requires crop random, got crop_padding 4 with crop centre: set crop to random, or "
            "crop_padding to 0",
            "--crop-padding requires --crop random, got --crop-padding 4 with --crop centre: set --crop to random, "
            "or --crop-padding to 0",
        ),
        (
            # What was given stays as it is, whatever it looks like.
            lambda: TrainConfig(synthetic=True, data="{batch}/run_dir must {"),
            "synthetic batches need no data set, got data '{batch}/run_dir must {': leave out synthetic or data",
            "synthetic batches need no data set, got data '{batch}/run_dir must {': leave out --synthetic or --data",
        ),
        (
            lambda: TrainConfig(precision=cast("PrecisionName", "{seed}")),
            "precision must be one of float32, bfloat16, got '{seed}'",
            "--precision must be one of float32, bfloat16, got '{seed}'",
        ),
    ],
)
def test_a_message_names_fields_in_python_and_options_on_the_command_line(error, in_python, on_the_command_line):
    context = run_train.make_context("run-train", [])
    with pytest.raises(SettingError) as raised:
        error()
    assert str(raised.value) == in_python
    # Without the frame of this test, which is the user's to Loopfeed.
    assert describe_error(raised.value.with_traceback(None), option_names(context)) == on_the_command_line


def test_a_command_names_its_own_options():
    error = SettingError("eval_split", "{setting} or {decay_all} or {flip}")
    assert error.render(option_names(run_eval.make_context("run-eval", []))) == "--split or decay_all or flip"
    train = option_names(run_train.make_context("run-train", []))
    assert error.render(train) == "--eval-split or --decay-all or --flip"


def test_a_resume_names_the_options_that_it_cannot_take():
    before = TrainConfig(batch=4, chunk_batches=2, data="/packed")
    with pytest.raises(SettingError) as raised:
        check_settings(TrainConfig(batch=8, chunk_batches=None, data="/packed"), before)
    assert raised.value.setting == "batch"
    assert "differ: batch was 4, got 8; chunk_batches was 2, got None. Restore" in str(raised.value)
    words = raised.value.render(option_names(run_train.make_context("run-train", [])))
    assert "differ: --batch was 4, got 8; --chunk was 2, got None. Restore" in words
    assert "or begin another from its weights: --init-from=RUN" in words
    assert words.endswith(" with another --run-dir")


def test_an_empty_text_clears_the_patterns_of_a_recipe_or_a_recorded_run():
    given = command_line(run_train.make_context("run-train", ["--freeze", "", "--group", ""]))
    before = OptionSource("recipe", {"freeze": "stem.*", "groups": "fc.*=learning_rate:2x"})
    assert merge_options(before, given).settings == {"freeze": None, "groups": None}
