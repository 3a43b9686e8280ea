"""What a Python program reads of errors: its own lines, and arguments in place of options."""

import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest

import loopfeed
from loopfeed import TrainConfig, train
from loopfeed.engine.config import SETTINGS
from loopfeed.engine.python_calls import in_python_words
from tests.toy import CountedBatches, Linear, toy_batch, toy_config


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.delenv("LOOPFEED_TRACEBACK", raising=False)


def frames(error: BaseException) -> list[str]:
    """Return the functions of a traceback, outermost first, from the call of the test on."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)][1:]


def broken_loss(outputs, labels, weights):
    return helper(outputs, labels)


def helper(outputs, labels):
    return outputs @ labels


def broken_callback(record):
    raise LookupError("mine")


def test_an_error_in_a_part_of_the_user_shows_the_users_frames_alone(monkeypatch):
    parts: dict[str, Any] = {"model": Linear(), "batches": toy_batch}
    for given, names in (
        ({"loss": broken_loss}, ["broken_loss", "helper"]),
        ({"callbacks": [broken_callback]}, ["broken_callback"]),
        ({"batches": CountedBatches(raise_at=1)}, ["__call__"]),
    ):
        with pytest.raises((TypeError, LookupError, ConnectionResetError)) as raised:
            train(toy_config(), **(parts | given))
        assert frames(raised.value) == names
        assert [note for note in raised.value.__notes__ if "LOOPFEED_TRACEBACK=full" in note]
    monkeypatch.setenv("LOOPFEED_TRACEBACK", "full")
    with pytest.raises(LookupError) as raised:
        train(toy_config(), **parts, callbacks=[broken_callback])
    assert frames(raised.value)[-1] == "broken_callback"
    assert len(frames(raised.value)) > 5


def test_an_error_of_a_rule_has_no_frames_and_a_fault_of_loopfeed_keeps_its_own(tmp_path, monkeypatch):
    with pytest.raises(
        loopfeed.ShardError, match=r"does not exist; create it with loopfeed\.pack\(SOURCE, DEST\)"
    ) as it:
        train(TrainConfig(data=str(tmp_path / "none"), steps=1))
    assert frames(it.value) == []

    monkeypatch.setattr("loopfeed.engine.run.train.check_cache_places", dict[TrainConfig, None]().__getitem__)
    with pytest.raises(KeyError) as fault:
        train(toy_config(), model=Linear(), batches=toy_batch)
    assert "set_up_run" in frames(fault.value)


def test_a_folder_that_is_taken_is_refused_in_the_words_of_python(tmp_path):
    config = toy_config(run_dir=str(tmp_path / "run"))
    parts: dict[str, Any] = {"model": Linear(), "batches": toy_batch}
    train(config, **parts)
    rule = r"another folder \(run_dir\), continue the run \(resume=True\) or overwrite it \(overwrite=True\)$"
    with pytest.raises(ValueError, match=rule):
        train(config, **parts)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("continue it (--resume), not --overwrite", "continue it (resume=True), not overwrite=True"),
        ("give --data DIR, or --eval-split off", "give data=DIR, or eval_split=off"),
        ("set --learning-rate; --no-eval-mirror", "set learning_rate; eval_mirror=False"),
        ("resume it with run-train --resume", "resume it with train(…, resume=True)"),
        (
            "from it: run-train --run-dir runs/a --resume",
            "from it: train(replace(run_settings('runs/a'), resume=True))",
        ),
        (
            "try control-run RUN --snapshot, or `run-eval --data`",
            "try control-run RUN --snapshot, or `run-eval --data`",
        ),
        ("--xla_flag and --no-such-option stay", "--xla_flag and --no-such-option stay"),
    ],
)
def test_options_become_settings(text, right):
    assert in_python_words(text) == right


def test_every_option_has_a_name_in_python():
    for setting in SETTINGS.values():
        for option in setting.options:
            assert in_python_words(f"({option.split('/')[0]})").startswith(f"({setting.name}")


def test_the_public_functions_are_pickled_by_their_public_names():
    for name in loopfeed.__all__:
        found = getattr(loopfeed, name)
        assert pickle.loads(pickle.dumps(found)) is found


def test_notices_are_in_the_words_of_python(tmp_path: Path):
    said: list[str] = []
    config = toy_config(run_dir=str(tmp_path / "run"))
    parts: dict[str, Any] = {"model": Linear(), "batches": toy_batch}
    train(config, **parts)
    loopfeed.train(loopfeed.TrainConfig(**(config.to_json() | {"resume": True})), notify=said.append, **parts)
    assert [line for line in said if "give a larger steps, or append a cycle of the schedule (append_epochs)" in line]
