"""The settings: each has a type and a range, and all survive JSON."""

import hashlib
import inspect
import itertools
import json
import math
import pickle
from copy import copy
from dataclasses import fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.engine.config import (
    AUGMENTATION,
    COMPILATION,
    COUNTED_IN_EPOCHS,
    DATA,
    INFEED,
    MONITORING,
    OPTIMISER,
    OUTPUT,
    SETTINGS,
    TRAINING,
    ConfigError,
    SettingError,
    TrainConfig,
    parse_profile_steps,
    settings_table,
)
from loopfeed.engine.settings import OnResume, TakesEffect
from loopfeed.engine.stages import Stage, Stages

TEXT = st.text(min_size=1, max_size=20)
FORMATTED = {
    "clip_order": st.sampled_from(["1", "2", "2.5", "inf"]),
    "freeze": st.sampled_from(["conv1", r"layer1\..*,bn[1,2]", "a{1,2}, b"]),
    "groups": st.sampled_from(["fc=learning_rate:10x", ".*bias=weight_decay:0;a[;]=learning_rate:.5"]),
    "devices": st.sampled_from(["1", "8", "cpu:4"]),
    "profile_steps": st.sampled_from(["0:1", "10:40"]),
    "stages": st.sampled_from([Stages([Stage()]), Stages([Stage(until="2e", flip=0.5), Stage(batch=4)])]),
    "cache": st.sampled_from(["off", "here/cache"]),
    "class_weights": st.sampled_from(["none", "balanced", "weights.csv"]),
    "fold": st.sampled_from(["1/2", "10/10"]),
    "sampling": st.sampled_from(["natural", "sqrt", "weights.csv"]),
    "crop_area": st.floats(2.0**-126, 1),
    "storage_options": st.sampled_from(["endpoint=http://127.0.0.1:9000,region=eu", "profile=mine"]),
}


def valid_values(name):
    """Return a strategy for the values that a setting may have, by its declaration."""
    declared = SETTINGS[name]
    low, high = declared.between or (0, 0)
    values: st.SearchStrategy[Any]
    if name in FORMATTED:
        values = FORMATTED[name]
    elif declared.choices:
        values = st.sampled_from(declared.choices)
    elif declared.kind is tuple:
        values = st.tuples(*[st.floats(low, high)] * 3)
    elif declared.between:
        values = st.integers(int(low), int(high)) if declared.kind is int else st.floats(low, high)
    else:
        values = st.booleans() if declared.kind is bool else TEXT
    return st.none() | values if declared.is_optional else values


VALID = {name: valid_values(name) for name in SETTINGS if name != "synthetic"}  # which needs other settings beside it
INTEGERS, REALS, SWITCHES, TEXTS = (
    [name for name, declared in SETTINGS.items() if declared.kind is kind and not declared.choices]
    for kind in (int, float, bool, str)
)
OPTIONAL = [name for name, declared in SETTINGS.items() if declared.is_optional]
NAMES = [field.name for field in fields(TrainConfig)]


def configured(**values: Any) -> TrainConfig:
    """Settings that a caller without a type checker may give."""
    return TrainConfig(**values)


@given(st.fixed_dictionaries({}, optional=VALID))
def test_settings_survive_json(values):
    config = TrainConfig(**values)
    text = json.dumps(config.to_json(), allow_nan=False)
    assert TrainConfig.from_json(json.loads(text)) == config
    assert {name: getattr(config, name) for name in values} == values


def test_golden_defaults():
    """The defaults stand in the record of every run: to change one is to change what a command without it does."""
    text = json.dumps(TrainConfig().to_json(), sort_keys=True, allow_nan=False)
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "ce675864e4be862544a94e40236a9d58d4fa9061fe6c60667f9fe976c29764fd"
    ), text


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("steps", 0, 2**31 - 2),
        ("batch", 1, 2**20),
        ("image_size", 1, 2**14),
        ("num_classes", 1, 2**16),
        ("momentum", 0, 1),
        ("seed", 0, 2**63 - 1),
        ("chunk_batches", 1, 1024),
        ("prefetch", 1, 1024),
        ("reader_threads", 1, 1024),
        ("infeed_timeout_s", 0.001, 86_400),
    ],
)
def test_both_ends_of_a_range(name, low, high):
    for value in (low, high):
        assert getattr(configured(**{name: value}), name) == value
    step = 1e-6 if name in REALS else 1
    for value in (low - step, high + step):
        with pytest.raises(ValueError, match=rf"^{name} must lie in {low} … {high}, got {value}$"):
            configured(**{name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), 10**400, -(10**400)])
def test_a_real_setting_is_finite(value):
    for name in REALS:
        with pytest.raises(ValueError, match=f"^{name} must "):
            configured(**{name: value})


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (INTEGERS, (True, 1.0, "1", [1], np.float32(1), np.bool(True), math.nan)),
        (REALS, (True, "0.1", 1j, np.bool(False), np.array([0.1]))),
        (SWITCHES, (0, 1, "true", None, np.bool(True))),
        (TEXTS, (0, False, b"text", ["text"])),
        ([name for name in NAMES if name not in OPTIONAL], (None,)),
        (["transport"], (1,)),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(names, values):
    for name, wrong in itertools.product(names, values):
        rule = (
            rf"^{name} must be of type \w+( or None)?, got .* of type {type(wrong).__name__}(: an object goes to .*)?$"
        )
        with pytest.raises(ValueError, match=rule):
            configured(**{name: wrong})


@pytest.mark.parametrize("name", ["data", "model", "loss", "optimizer", "schedule"])
def test_an_array_in_the_place_of_a_name_is_described_and_sent_where_it_belongs(name):
    images = np.zeros((64, 16, 16, 3), np.uint8)
    with pytest.raises(SettingError) as refused:
        configured(**{name: (images, [1] * 10**6)})
    message = str(refused.value)
    assert f"{name} must be of type str" in message
    assert "(<ndarray [64, 16, 16, 3] of uint8>, [1, 1, 1" in message
    assert f"train(config, {'batches' if name == 'data' else name}=…)" in message
    assert len(message) < 500
    assert "\n" not in message


@pytest.mark.parametrize("text", ["10", "10:", ":10", "10:10", "20:10", "-1:5", "1:2:3", "a:b", "1.5:3"])
def test_a_window_of_steps_has_a_start_before_its_stop(text):
    with pytest.raises(ValueError, match=f"^profile_steps must be START:STOP, .* START < STOP, got '{text}'$"):
        configured(profile_steps=text)


def test_a_window_of_steps_is_half_open():
    assert parse_profile_steps("10:40") == range(10, 40)


@pytest.mark.parametrize("name", TEXTS)
def test_an_empty_text_is_refused(name):
    with pytest.raises(ValueError, match=rf"^{name} must not be empty, got '': leave it out for its default or, "):
        configured(**{name: ""})


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_integers_of_numpy_become_integers(kind):
    values = [getattr(configured(**{name: kind(7)}), name) for name in INTEGERS]
    assert {(type(value), value) for value in values} == {(int, 7)}


@pytest.mark.parametrize("given", [1, np.float32(0.5), np.float64(0.25), np.int32(1)])
def test_any_real_number_becomes_a_float(given):
    names = [name for name in REALS if name not in ("hue", "restart_growth")]
    values = [getattr(configured(**{name: given}), name) for name in names]
    assert {(type(value), value) for value in values} == {(float, float(given))}


@pytest.mark.parametrize("name", ["data", "run_dir", "compilation_cache", "dump_hlo"])
def test_a_path_becomes_text(name):
    for path in (Path("some") / "where", PurePosixPath("some/where")):
        assert getattr(configured(**{name: path}), name) == "some/where"


def test_the_program_is_dumped_on_this_machine():
    with pytest.raises(ValueError, match=r"^dump_hlo must be a path on this machine, .*, got s3://bucket/run: choose"):
        configured(dump_hlo="s3://bucket/run")


def test_a_run_is_written_to_a_path_or_to_a_store_that_can_be_written():
    for url in ("s3://bucket/run", "gs://bucket/run", "file:///mnt/run"):
        assert configured(run_dir=url).run_dir == url
    for url in ("http://host/run", "memory://run", "s3:/bucket://run"):
        with pytest.raises(
            ValueError, match=r"^run_dir must be a path or the URL of a folder in a store \(s3://, gs://"
        ):
            configured(run_dir=url)


def test_an_unknown_key_is_an_error():
    with pytest.raises(ConfigError, match=r"^TrainConfig has no setting 'batchsize': did you mean batch\?$"):
        TrainConfig.from_json({"batch": 8, "batchsize": 8})
    with pytest.raises(
        ConfigError, match=r"^TrainConfig has no setting 'horoscope': none of the \d+ is near to it; help"
    ):
        TrainConfig(horoscope=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lr", "learning_rate"),
        ("keep", "keep_snapshots"),
        ("snapshot_every", "snapshot_every_steps"),
        ("chunk", "chunk_batches"),
    ],
)
def test_the_spelling_of_an_option_leads_to_its_setting(given, meant):
    with pytest.raises(ConfigError, match=rf"^TrainConfig has no setting '{given}': did you mean {meant}\?$"):
        TrainConfig.from_json({given: 1})


@pytest.mark.parametrize("kind", [TypeError, ValueError])
def test_a_misspelt_setting_is_refused_with_a_suggestion(kind):
    with pytest.raises(kind, match=r"^TrainConfig has no setting 'infeed_timeout': did you mean infeed_timeout_s\?$"):
        configured(infeed_timeout=10)
    with pytest.raises(kind, match=r"^TrainConfig has no setting 'labelsmoothing': did you mean label_smoothing\?$"):
        replace(TrainConfig(), labelsmoothing=0.1)  # type: ignore[call-arg]


def test_an_error_carries_its_setting_and_survives_another_process():
    with pytest.raises(SettingError) as raised:
        configured(batch=0)
    for error in (raised.value, pickle.loads(pickle.dumps(raised.value)), copy(raised.value)):
        assert (error.setting, str(error)) == ("batch", "batch must lie in 1 … 1048576, got 0")
        assert error.render(lambda name: f"<{name}>") == "<batch> must lie in 1 … 1048576, got 0"


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_declared_whole(name):
    declared = SETTINGS[name]
    assert declared.help_text.endswith(".")
    assert declared.help_text[0].isupper()
    assert declared.group in {DATA, TRAINING, OPTIMISER, AUGMENTATION, INFEED, OUTPUT, MONITORING, COMPILATION}
    assert isinstance(declared.takes_effect, TakesEffect)
    assert isinstance(declared.on_resume, OnResume)
    assert declared.default == getattr(TrainConfig(), name)
    assert (declared.default is None) <= declared.is_optional
    # A number without a range would let nonsense pass, and an option for a number needs a unit or a range to show.
    assert (declared.between is not None) == (declared.kind in (int, float, tuple))
    # None says nothing of what is taken instead.
    assert declared.default is not None or declared.default_text is not None or name == "dump_hlo"


@pytest.mark.parametrize("name", NAMES)
def test_settings_named_in_help_texts_exist(name):
    named: list[str] = []

    def note(other: str) -> str:
        named.append(other)
        return other

    SETTINGS[name].render_help(note)
    SETTINGS[name].render_default(note)
    assert set(named) - {name} <= set(NAMES)


def test_the_reference_has_a_row_for_every_setting():
    rows = settings_table()
    assert [row["name"] for row in rows] == NAMES
    for row in rows:
        assert all(row[column] for column in row if column not in ("range", "unit")), row
        assert f"        {row['name']}: " in (TrainConfig.__doc__ or "")
    table = {row["name"]: row for row in rows}
    assert table["learning_rate"] == {
        "name": "learning_rate",
        "option": "--learning-rate, --lr",
        "type": "float | None",
        "default": "0.1 · images per update / 256",
        "range": "at least 0, finite in float32",
        "unit": "RATE",
        "group": "Optimiser",
        "help": "Peak learning rate of the schedule. The default suits sgd; the adaptive optimizers need a lower rate.",
        "stage": "argument of the program: changing it compiles nothing",
        "on_resume": "may change",
    }
    assert table["crop"]["range"] == "centre, random, resized"
    assert table["decay_all"]["option"] == "--decay-all / --no-decay-all"
    assert (table["epochs"]["help"].partition(".")[0], table["steps"]["on_resume"]) == (
        "Passes over the training split, instead of steps",
        "may change, to more than the steps already done",
    )


def test_epochs_and_steps_are_pairs():
    names = ("", "eval_every_", "warmup_", "snapshot_every_", "histogram_every_", "log_images_every_")
    assert [*COUNTED_IN_EPOCHS] == [(f"{name}epochs", f"{name}steps") for name in names]


@pytest.mark.parametrize(("text", "epochs"), [("1e", 1.0), ("0.5e", 0.5), ("0e", 0.0), ("12.250e", 12.25)])
@pytest.mark.parametrize(("name", "counted"), COUNTED_IN_EPOCHS)
def test_steps_can_be_given_in_epochs(name, counted, text, epochs):
    given: dict[str, Any] = {counted: text}
    assert TrainConfig(**given) == configured(**{name: epochs})


def test_two_numbers_of_epochs_are_refused():
    recorded = TrainConfig(eval_every_epochs=1, eval_every_steps=5)
    message = "^eval_every_epochs and eval_every_steps must not both be given, got 1.0 and 0.5e: leave one out$"
    with pytest.raises(ValueError, match=message):
        replace(recorded, eval_every_steps="0.5e")  # type: ignore[arg-type]
    chosen = replace(recorded, eval_every_epochs=None, eval_every_steps="0.5e")  # type: ignore[arg-type]
    assert chosen == configured(eval_every_epochs=0.5)
    assert replace(recorded, eval_every_steps="1e") == configured(eval_every_epochs=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["1", "e", "1e3", "-1e", ".5e", "1 e", "1e ", "inf", "infe", "1E"])
def test_no_other_text_is_a_number_of_epochs(text):
    with pytest.raises(ValueError, match=r"^eval_every_steps must be of type int or None, got '"):
        configured(eval_every_steps=text)


@pytest.mark.parametrize(("batch", "rate"), [(256, 0.1), (128, 0.05), (8192, 3.2)])
def test_the_default_rate_grows_with_the_batch(batch, rate):
    assert TrainConfig(batch=batch).peak_learning_rate == pytest.approx(rate, rel=1e-12)
    assert TrainConfig(batch=batch // 4, accumulate_steps=4).peak_learning_rate == pytest.approx(rate, rel=1e-12)
    assert TrainConfig(batch=batch, learning_rate=0).peak_learning_rate == 0


def test_the_signature_names_every_setting():
    """`__new__` takes any name, so that a misspelt one gets a suggestion; help() and editors must not show that."""
    parameters = inspect.signature(TrainConfig).parameters
    assert list(parameters) == list(SETTINGS)
    assert {name: each.default for name, each in parameters.items()} == {n: s.default for n, s in SETTINGS.items()}


def test_three_numbers_of_the_channels():
    channels = TrainConfig(mean=[0, np.float32(0.5), 1], std=np.array([0.25, 0.5, 1]))  # type: ignore[arg-type]
    assert (channels.mean, channels.std) == ((0.0, 0.5, 1.0), (0.25, 0.5, 1.0))
    assert TrainConfig.from_json(json.loads(json.dumps(channels.to_json()))) == channels
    for value in ((0.5, 0.5), (0.5, 0.5, 0.5, 0.5), (0.5, 0.5, "a"), 0.5, "abc", (0.5, 0.5, 1.5), (0.5, 0.5, math.nan)):
        with pytest.raises(ConfigError, match=r"mean must be three numbers in 0 … 1 \(R, G and B\), got "):
            TrainConfig(mean=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"std must be three numbers in 0\.004 … 1"):
        TrainConfig(std=(0.0, 0.5, 0.5))


NUMBERS = [name for name, each in SETTINGS.items() if each.kind in (int, float, tuple)]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_difference_of_times_and_an_integer_without_end_are_no_number(name):
    is_triple = SETTINGS[name].kind is tuple
    for value in (np.timedelta64(1, "D"), np.timedelta64(1, "s"), 2**10_000, -(10**5_000)):
        with pytest.raises(SettingError, match=f"^{name} must ") as caught:
            TrainConfig(**{name: [value] * 3 if is_triple else value})  # type: ignore[arg-type]
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("area", [0, 0.0, 1e-300, 1e-45])
def test_a_crop_has_an_area(area):
    with pytest.raises(SettingError, match=r"^crop_area must be above 0 in float32, got .*: 0\.08 is usual"):
        TrainConfig(crop_area=area)
    assert TrainConfig(crop_area=2.0**-126).crop_area > 0


@pytest.mark.parametrize(
    "value", [{"clip_order": "١٢"}, {"groups": "conv1/*:learning_rate=١x"}, {"devices": "٢"}, {"profile_steps": "١:٢"}]
)
def test_digits_of_other_scripts_are_no_number(value):
    with pytest.raises(SettingError):
        TrainConfig(**value)
