"""A resumed run is bit-identical to an uninterrupted one; changes that are not allowed are refused by name."""

import errno
import json
import os
import re
import shutil
import signal
import time
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from loopfeed import ConfigError, TrainConfig, replay_run, train
from loopfeed.engine.control.request import ControlEvent, ControlRequest
from loopfeed.engine.data.drawn_images import SAMPLING_DIGEST
from loopfeed.engine.parts import UserParts
from loopfeed.engine.records.control_log import read_events
from loopfeed.engine.records.control_requests import send_request
from loopfeed.engine.records.machine import Topology, describe_promise
from loopfeed.engine.records.recorded_run import RecordedRun, read_recorded
from loopfeed.engine.records.run_folder import recorded_versions
from loopfeed.engine.records.snapshot import snapshot_steps, write_snapshot
from loopfeed.engine.records.snapshot_writer import SnapshotWriter
from loopfeed.engine.run.changes import (
    HOST_SETTINGS,
    RUNTIME_SETTINGS,
    check_same_everywhere,
    check_settings,
    check_steps,
    note_changes,
)
from loopfeed.engine.run.descriptions import rules_of
from loopfeed.engine.run.resume import Resume, find_cuts
from loopfeed.engine.run.run import NonFiniteError
from loopfeed.engine.run.train import plan_run
from loopfeed.engine.stages import Stage, Stages
from tests.fake_source import fake_source, leave_unfinished_split, pack
from tests.toy import SIZE, Linear, toy_batch, toy_config

STEPS = 8
EVERYTHING: dict[str, Any] = {
    "optimizer": "nesterov",
    "schedule": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "clip_norm": 1.0,
    "accumulate_steps": 3,
    "ema_decay": 0.9,
    "label_smoothing": 0.1,
    "crop": "random",
    "crop_padding": 1,
    "flip": 0.5,
    "brightness": 0.2,
    "hue": 0.1,
    "mixup": 0.2,
    "erasing": 0.3,
    "eval_every_steps": 3,
}
EVALUATED = (
    np.concatenate([toy_batch(100 + number)[0] for number in range(3)]),
    np.concatenate([toy_batch(100 + number)[1] for number in range(3)]),
)


def run(path, *, batches=toy_batch, steps=STEPS, evaluation=EVALUATED, **values):
    config = toy_config(steps=steps, run_dir=path, **(EVERYTHING | values))
    return train(config, model=Linear(), batches=batches, evaluation=evaluation)


def lines(path, *, without=("images_per_s", "wait_ms", "time")):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in record.items() if name not in without} for record in records]


def assert_same(path, reference):
    assert lines(path / "loss.jsonl") == lines(reference / "loss.jsonl")
    assert lines(path / "eval.jsonl") == lines(reference / "eval.jsonl")
    assert (path / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()


class Unhurried:
    """Toy batches that wait for the snapshots of the steps before, so that the disk keeps up with each."""

    def __init__(self, path, every, pulls=3):
        self._path, self._every, self._pulls = path, every, pulls

    def __call__(self, step):
        done = step // self._pulls // self._every * self._every
        deadline = time.monotonic() + 60
        # With one batch read ahead, those of the update before are with the program by now: its snapshot will come.
        while done and done not in snapshot_steps(self._path / "snapshots"):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return toy_batch(step)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return an uninterrupted run with all its snapshots."""
    path = tmp_path_factory.mktemp("reference") / "run"
    run(path, batches=Unhurried(path, 1), snapshot_every_steps=1, keep_snapshots=0, prefetch=1)
    return path


def test_the_reference_has_snapshots_evaluations_and_learns(reference):
    assert len(snapshot_steps(reference / "snapshots")) >= STEPS - 2
    assert [record["step"] for record in lines(reference / "eval.jsonl")] == [3, 6, 8]
    losses = [record["loss"] for record in lines(reference / "loss.jsonl")]
    assert len(set(losses)) == STEPS


@pytest.mark.parametrize("step", range(STEPS + 1))
def test_a_run_resumed_from_any_step_ends_with_the_same_bits(reference, tmp_path, step):
    path = tmp_path / "run"
    shutil.copytree(reference, path)
    for later in snapshot_steps(path / "snapshots"):
        if later > step:
            shutil.rmtree(path / "snapshots" / str(later))
    # As after a SIGKILL: what came after the snapshot is there already, and its last line is torn.
    with (path / "loss.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    run(path, resume=True, keep_snapshots=0)
    assert_same(path, reference)
    assert json.loads((path / "result.json").read_text())["steps_done"] == STEPS


@pytest.mark.parametrize("pull", [4, 9])  # between two updates, and within one
def test_a_run_stopped_between_or_within_updates_resumes_bit_for_bit(reference, tmp_path, pull):
    def interrupted(step):
        if step == pull:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return toy_batch(step)

    path = tmp_path / "run"
    result = run(path, batches=interrupted, prefetch=1)
    assert result.stopped_by == "SIGTERM"
    assert result.steps_done < STEPS
    assert snapshot_steps(path / "snapshots") == [result.steps_done]
    run(path, resume=True)
    assert_same(path, reference)


class StoppingEvaluation:
    """The toy's evaluation set, which requests a stop in its second pass."""

    thread_safe = True
    batch, height, width, num_batches = 8, SIZE, SIZE, 3

    def fill(self, step, rows, pixels, labels, *, timeout_s):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        images = slice(step % 3 * 8, step % 3 * 8 + 8)
        pixels[...], labels[...] = EVALUATED[0][images], EVALUATED[1][images]


def test_an_interrupted_evaluation_is_made_once_after_the_resume(reference, tmp_path):
    path = tmp_path / "run"
    result = run(path, evaluation=StoppingEvaluation(), prefetch=1)
    assert result.steps_done in (5, 6)  # the evaluation batch is read ahead
    assert [record["step"] for record in lines(path / "eval.jsonl")] == [3]
    run(path, resume=True)
    assert_same(path, reference)


def test_a_stop_in_the_last_evaluation_is_no_end_and_that_is_made_after_it(tmp_path, reference):
    class StoppingLast(StoppingEvaluation):
        def fill(self, step, rows, pixels, labels, *, timeout_s):
            super().fill(step - 4 if step == 8 else 0, rows, pixels, labels, timeout_s=timeout_s)

    path = tmp_path / "run"
    result = run(path, evaluation=StoppingLast(), prefetch=1)
    assert (result.steps_done, result.stopped_by, result.is_complete) == (STEPS, "SIGTERM", False)
    assert json.loads((path / "result.json").read_text())["stopped_by"] == "SIGTERM"
    resumed = run(path, resume=True)
    assert ([record.step for record in resumed.evaluations], resumed.stopped_by) == ([STEPS], "steps")


def test_a_run_killed_before_its_first_snapshot_starts_again(reference, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(reference, path)
    shutil.rmtree(path / "snapshots")
    told: list[str] = []
    config = toy_config(steps=STEPS, run_dir=path, resume=True, **EVERYTHING)
    train(config, model=Linear(), batches=toy_batch, evaluation=EVALUATED, notify=told.append)
    assert told[0].endswith("from its beginning, because it has no snapshot")
    assert_same(path, reference)


def test_a_damaged_snapshot_is_skipped_with_a_warning(reference, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(reference, path)
    newest = snapshot_steps(path / "snapshots")[-1]
    for file in (path / "snapshots" / str(newest) / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    told: list[str] = []
    config = toy_config(steps=STEPS, run_dir=path, resume=True, **EVERYTHING)
    train(config, model=Linear(), batches=toy_batch, evaluation=EVALUATED, notify=told.append)
    assert told[0].startswith("warning: ")
    assert f"snapshots/{newest}" in told[0]
    assert_same(path, reference)


def test_resuming_a_finished_run_does_nothing_and_changes_no_file(reference, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(reference, path)
    calls: list[int] = []

    def noted(step):
        calls.append(step)
        return toy_batch(step)

    result = run(path, batches=noted, resume=True, keep_snapshots=0)
    assert result.losses.size == 0
    assert result.stopped_by == "steps"
    assert calls == [STEPS * 3]  # its shape is part of the program
    assert_same(path, reference)


def test_more_steps_and_another_rate_may_be_given_and_are_recorded(tmp_path):
    plain: dict[str, Any] = {"schedule": "constant", "warmup_steps": 0, "learning_rate": 0.1}
    run(tmp_path / "a", steps=4, **plain)
    run(tmp_path / "a", steps=6, resume=True, **plain)
    run(tmp_path / "b", steps=6, **plain)
    assert lines(tmp_path / "a/loss.jsonl") == lines(tmp_path / "b/loss.jsonl")
    run(tmp_path / "a", steps=8, resume=True, **(plain | {"learning_rate": 0.05}))
    assert [record["lr"] for record in lines(tmp_path / "a/loss.jsonl")] == [0.1] * 6 + [0.05] * 2
    recorded = read_recorded(tmp_path / "a")
    assert [recorded.config_at(step).learning_rate for step in range(1, 9)] == [0.1] * 6 + [0.05] * 2
    assert [recorded.config_at(step).steps for step in range(1, 9)] == [4] * 4 + [6] * 2 + [8] * 2
    assert recorded.changes() == (4, 6)


def test_packing_another_split_during_a_run_does_not_end_it(tmp_path):
    pack(fake_source(20), tmp_path / "packed")
    plain: dict[str, Any] = {"data": tmp_path / "packed", "batch": 4, "run_dir": tmp_path / "run", "learning_rate": 0.1}
    train(TrainConfig(steps=2, **plain), model=Linear())
    leave_unfinished_split(tmp_path / "packed/val")
    told: list[str] = []
    result = train(TrainConfig(steps=4, resume=True, **plain), model=Linear(), notify=told.append)
    assert result.steps_done == 4
    assert not any("warning" in each for each in told)
    assert replay_run(tmp_path / "run", from_step=0, model=Linear()).differences == ()
    with pytest.raises(ValueError, match="/val is only partly packed"):
        train(TrainConfig(steps=2, **(plain | {"run_dir": tmp_path / "other"})), model=Linear())
    assert not (tmp_path / "other").exists()


OTHERS: dict[str, Any] = {
    "loss": "mean-squared-error",
    "split": "test",
    "eval_split": "off",
    "eval_mirror": True,
    "batch_norm_group": 2,
    "batch_norm_sync": True,
    "synthetic": True,
    "batch": 4,
    "model": "resnet8",
    "num_classes": 4,
    "stop_metric": "top1",
    "image_size": 2,
    "eval_image_size": 3,
    "mean": (0.4, 0.4, 0.4),
    "std": (0.2, 0.2, 0.2),
    "precision": "bfloat16",
    "kernels": "xla",
    "init_from": "/elsewhere/weights.safetensors",
    "optimizer": "adamw",
    "schedule": "step",
    "cycle_momentum": True,
    "decay_all": True,
    "accumulate_steps": 2,
    "crop": "resized",
    "crop_padding": 2,
    "padding_mode": "reflect",
    "crop_area": 0.5,
    "flip": 0.25,
    "brightness": 0.1,
    "contrast": 0.1,
    "saturation": 0.1,
    "hue": 0.2,
    "mixup": 0.1,
    "cutmix": 0.1,
    "erasing": 0.1,
    "seed": 1,
    "transport": "callback",
    "chunk_batches": 2,
    "deterministic": False,
    "auto_augment": "randaugment",
    "auto_augment_ops": 3,
    "auto_augment_magnitude": 5,
    "clip_order": "inf",
    "freeze": "bias",
    "groups": "bias=weight_decay:0",
    "layer_decay": 0.5,
    "stages": Stages([Stage(until=1), Stage()]),
    "order": "windowed",
    "window_gb": 2.0,
    "sampling": "balanced",
    "fold": "2/5",
    "class_weights": "balanced",
}


def test_every_setting_is_fixed_or_may_change():
    names = {field.name for field in fields(TrainConfig)}
    assert set(OTHERS) | RUNTIME_SETTINGS | HOST_SETTINGS == names
    assert not RUNTIME_SETTINGS & HOST_SETTINGS
    assert not set(OTHERS) & (RUNTIME_SETTINGS | HOST_SETTINGS)


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_what_the_program_its_order_and_its_data_are_made_of_is_refused_by_name(name):
    before = toy_config(**EVERYTHING)
    with pytest.raises(ValueError, match=re.escape(f"{name} was {getattr(before, name)!r}, got {OTHERS[name]!r}.")):
        check_settings(replace(before, **{name: OTHERS[name]}), before)


@pytest.mark.parametrize(("before", "now"), [(None, 0.9), (0.9, None)])
def test_averaging_can_be_neither_enabled_nor_disabled(before, now):
    with pytest.raises(ValueError, match=rf"ema_decay was {before}, got {now}"):
        check_settings(toy_config(ema_decay=now), toy_config(ema_decay=before))
    check_settings(toy_config(ema_decay=0.5), toy_config(ema_decay=0.9))


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"optimizer": "lars"}, "the local rate of lars{}divided by ‖g + λ·w‖, now it divides by ‖g‖ + λ·‖w‖. Start"),
        ({"loss": "binary-cross-entropy"}, "the gradient of binary-cross-entropy{}was off by half at logits of"),
    ],
)
def test_a_run_of_another_rule_is_refused_by_its_name_and_its_weights_are_not(tmp_path, monkeypatch, values, rule):
    def batches(step):
        pixels, labels = toy_batch(step)
        return pixels, (np.eye(3, dtype=np.float32)[labels] if "loss" in values else labels)

    path, rule = tmp_path / "run", rule.format(" has changed since the version that made this run: then it ")
    config = toy_config(steps=2, run_dir=path, **values)
    train(config, model=Linear(), batches=batches)
    train(replace(config, steps=3, resume=True), model=Linear(), batches=batches)
    with monkeypatch.context() as earlier:
        earlier.setattr("loopfeed.engine.run.descriptions.rules_of", lambda *_: {})
        train(replace(config, run_dir=tmp_path / "old"), model=Linear(), batches=batches)
    before = contents(tmp_path / "old")
    with pytest.raises(ValueError, match=re.escape(rule) + r".*init_from=RUN"):
        train(replace(config, steps=3, run_dir=tmp_path / "old", resume=True), model=Linear(), batches=batches)
    with pytest.raises(ValueError, match=re.escape(rule)):
        replay_run(tmp_path / "old", from_step=0, model=Linear(), batches=batches)
    assert contents(tmp_path / "old") == before
    weights = tmp_path / "old/model.safetensors"
    train(replace(config, run_dir=tmp_path / "new", init_from=weights), model=Linear(), batches=batches)


RANDAUGMENT = {"auto_augment": "randaugment", "auto_augment_magnitude": 11}


@pytest.mark.parametrize(
    ("model", "values", "rules"),
    [
        ("resnet8", {}, {}),
        ("convnet8", {}, {"the gradient of the global maximum": 2}),
        ("convnet8-wide", {}, {"the gradient of the global maximum": 2}),
        ("resnet8", {"auto_augment": "trivialaugment"}, {"the translation of trivialaugment": 2}),
        ("resnet8", RANDAUGMENT, {"the translation of randaugment": 2}),
        ("resnet8", RANDAUGMENT | {"auto_augment_magnitude": 10}, {}),
        ("resnet8", RANDAUGMENT | {"image_size": 32}, {}),
        ("resnet8", {"order": "windowed"}, {}),
        ("resnet8", {"order": "windowed", "mixup": 0.2}, {"the windowed order of images that are mixed": 2}),
        ("resnet8", {"order": "windowed", "cutmix": 1.0}, {"the windowed order of images that are mixed": 2}),
        ("resnet8", {"mixup": 0.2}, {}),
    ],
)
def test_a_run_records_only_the_changed_rules_that_it_uses(model, values, rules):
    data: Any = SimpleNamespace(source=SimpleNamespace(height=64, width=662), location="/packed")
    named: Any = SimpleNamespace(name=model)
    assert rules_of(toy_config(**values), UserParts(), named, data) == rules


def contents(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != ".lock"}


def test_a_planned_resume_says_from_where_and_leaves_everything_as_it_was(reference, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(reference, path)
    shutil.rmtree(path / "snapshots" / str(STEPS))
    before = contents(path)
    told: list[str] = []
    config = toy_config(steps=STEPS, run_dir=path, resume=True, **EVERYTHING)
    plan_run(config, model=Linear(), batches=toy_batch, evaluation=EVALUATED, notify=told.append)
    assert f"resuming {path} from the snapshot of step {STEPS - 1}" in told
    for values, batches, message in (
        ({"seed": 5}, toy_batch, "seed was 0, got 5"),
        ({"run_dir": None}, toy_batch, "the setting resume needs a run folder"),
        ({}, lambda step: toy_batch(step, batch=4), "8"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_run(replace(config, **values), model=Linear(), batches=batches, evaluation=EVALUATED)
    assert contents(path) == before


def test_a_run_may_be_lengthened_or_cut_but_not_to_what_is_behind_it(tmp_path):
    path = tmp_path / "run"
    config = toy_config(steps=4, run_dir=path)
    train(config, model=Linear(), batches=toy_batch)
    before = contents(path)
    for steps in (0, 3):
        with pytest.raises(ValueError, match=rf"more than the 4 already done, got {steps}: give more steps"):
            train(replace(config, steps=steps, resume=True), model=Linear(), batches=toy_batch)
    assert contents(path) == before
    with pytest.raises(ValueError, match=r"got 4: leave steps out to continue to step 9, or give more steps"):
        check_steps(replace(config, steps=4), replace(config, steps=9), 4)
    check_steps(replace(config, steps=5), replace(config, steps=9), 4)
    check_steps(replace(config, steps=9), replace(config, steps=9), 9)


def test_parts_of_the_user_must_be_given_again(tmp_path):
    config = toy_config(steps=2, run_dir=tmp_path)
    train(config, model=Linear(), batches=toy_batch)
    before = contents(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"with a model \(linear\) and batches of your own, which must be given again: model=… and batches=…$",
    ):
        train(replace(config, steps=3, resume=True))
    with pytest.raises(ValueError, match=r"was trained with batches of your own, .* given again: batches=…$"):
        train(replace(config, steps=3, resume=True), model=Linear())
    assert contents(tmp_path) == before


def test_a_resume_reports_its_changes_and_the_learning_rate_factor_in_effect(reference, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(reference, path)
    shutil.rmtree(path / "snapshots" / str(STEPS))
    event = ControlEvent(pull=3, step=2, learning_rate_factor=0.25, snapshot=False, evaluate=False, stop=False,
                         request="a", time=1.0)  # fmt: skip
    (path / "control.jsonl").write_text(event.to_json() + "\n")
    (path / "result.json").unlink()  # it tells of no request
    told: list[str] = []
    config = toy_config(steps=STEPS, run_dir=path, resume=True, **(EVERYTHING | {"momentum": 0.5, "prefetch": 2}))
    plan_run(config, model=Linear(), batches=toy_batch, evaluation=EVALUATED, notify=told.append)
    assert "learning-rate factor 0.25, requested earlier, still applies (control-run --learning-rate-factor)" in told
    (changes,) = [each for each in told if each.startswith("resumed with")]
    assert "momentum 0.9 → 0.5" in changes
    assert "resume" not in changes.removeprefix("resumed with")


def test_a_refused_resume_changes_nothing(reference, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(reference, path)
    before = contents(path)
    for values, message in (
        ({"seed": 5}, "seed was 0, got 5"),
        ({"batches": lambda step: toy_batch(step, batch=4)}, "8"),
    ):
        with pytest.raises(ValueError, match=message):
            run(path, resume=True, **values)
    assert contents(path) == before


def test_other_data_are_refused_and_the_same_elsewhere_are_not(tmp_path):
    source = fake_source(24, size=SIZE)
    pack(source, tmp_path / "data")
    config = toy_config(steps=2, data=tmp_path / "data", num_classes=None, run_dir=tmp_path / "run")
    train(config, model=Linear())
    pack(source.changed(images=source.images[::-1].copy()), tmp_path / "other")
    with pytest.raises(ValueError, match=r"must have its original data, but these differ: .*other/train, "):
        train(replace(config, steps=3, data=str(tmp_path / "other"), resume=True), model=Linear())
    # A pass over other data would be another number of steps; the data are what differs.
    pack(fake_source(40, size=SIZE), tmp_path / "more")
    in_epochs = replace(config, steps=1000, epochs=1, run_dir=str(tmp_path / "epochs"))
    train(in_epochs, model=Linear())
    for steps in 1000, 3:
        other = replace(in_epochs, steps=steps, data=str(tmp_path / "more"), resume=True)
        with pytest.raises(ValueError, match=r"must have its original data, but these differ: .*more/train, "):
            train(other, model=Linear())
    (tmp_path / "data").rename(tmp_path / "moved")
    result = train(replace(config, steps=3, data=str(tmp_path / "moved"), resume=True), model=Linear())
    assert result.steps_done == 3


def test_settings_that_need_a_run_folder_require_it():
    for values in ({"resume": True}, {"snapshot_every_steps": 5}):
        with pytest.raises(ValueError, match="needs a run folder, got none"):
            train(toy_config(**values), model=Linear(), batches=toy_batch)


def test_control_requests_take_effect_where_they_are_logged_and_are_repeated(tmp_path):
    def asking(path):
        def batches(step):
            if step == 6:
                request = ControlRequest(learning_rate_factor=0.5, evaluate=True, snapshot=True)
                send_request(path, request)
                deadline = time.monotonic() + 60
                while any((path / "control").iterdir()):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            return toy_batch(step)

        return batches

    plain = {"schedule": "constant", "warmup_steps": 0, "learning_rate": 0.1, "eval_every_steps": 0, "prefetch": 1}
    path = tmp_path / "run"
    result = run(path, batches=asking(path), **plain)
    (event,) = read_events(path / "control.jsonl")
    assert 4 <= event.pull < STEPS * 3  # batches are read ahead, and the mailbox looks four times a second
    assert event.step == event.pull // 3 + 1
    rates = [record["lr"] for record in lines(path / "loss.jsonl")]
    assert rates == [0.1] * (event.step - 1) + [0.05] * (STEPS - event.step + 1)
    assert [record["step"] for record in lines(path / "eval.jsonl")] == [event.step, STEPS]
    assert event.step in snapshot_steps(path / "snapshots")
    # Killed before the snapshot that was asked for, and resumed: all of it happens again, at the same steps.
    again = tmp_path / "again"
    shutil.copytree(path, again)
    shutil.rmtree(again / "snapshots")
    repeated = run(again, resume=True, **plain)
    assert_same(again, path)
    assert np.array_equal(repeated.losses, result.losses)
    assert len(read_events(again / "control.jsonl")) == 1
    # And from behind it the factor still holds.
    behind = tmp_path / "behind"
    shutil.copytree(path, behind)
    shutil.rmtree(behind / "snapshots" / str(STEPS))
    run(behind, resume=True, **plain)
    assert_same(behind, path)


def test_an_evaluation_that_was_asked_for_in_an_update_that_a_stop_cuts_is_made_after_it(tmp_path):
    path = tmp_path / "run"

    def asking(step):
        if step == 6:
            send_request(path, ControlRequest(evaluate=True))
        if step == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        # The mailbox looks four times a second: it has the request long before the stop.
        time.sleep(0.1 if 6 < step <= 20 else 0)
        return toy_batch(step)

    plain: dict[str, Any] = {"accumulate_steps": 24, "eval_every_steps": 0, "steps": 3, "prefetch": 1}
    result = run(path, batches=asking, **plain)
    (event,) = read_events(path / "control.jsonl")
    assert (result.steps_done, event.step, result.evaluations) == (0, 1, ())
    run(path, resume=True, **plain)
    assert [record["step"] for record in lines(path / "eval.jsonl")] == [1, 3]


def test_a_stop_by_request_leaves_a_snapshot_and_is_not_repeated(tmp_path):
    path = tmp_path / "run"

    def asking(step):
        if step == 6:
            send_request(path, ControlRequest(stop=True))
            time.sleep(1)
        return toy_batch(step)

    result = run(path, batches=asking)
    assert result.stopped_by == "control-run"
    assert snapshot_steps(path / "snapshots") == [result.steps_done]
    assert run(path, resume=True).steps_done == STEPS


def test_a_top1_that_is_reached_ends_the_run_and_a_resumed_one_at_once(tmp_path):
    values: dict[str, Any] = {"eval_every_steps": 2, "learning_rate": 0.1, "schedule": "constant"}
    result = run(tmp_path, stop_at_top1=0.9, steps=100, **values)
    assert result.stopped_by == "top1"
    assert result.is_complete
    assert result.evaluations[-1].top1 >= 0.9
    assert all(record.top1 < 0.9 for record in result.evaluations[:-1])
    assert result.steps_done == result.evaluations[-1].step < 100
    said: list[str] = []
    config = toy_config(steps=100, run_dir=tmp_path, **(EVERYTHING | values), stop_at_top1=0.9, resume=True)
    again = train(config, model=Linear(), batches=toy_batch, evaluation=EVALUATED, notify=said.append)
    (complete,) = (
        number for number, each in enumerate(said) if each.startswith("the run is already complete, with a top")
    )
    assert "give a larger stop_at_top1 to train further" in said[complete]
    assert complete < next(number for number, each in enumerate(said) if each.startswith("compil"))
    assert (again.stopped_by, again.steps_done, again.losses.size) == ("top1", result.steps_done, 0)
    further = run(tmp_path, steps=result.steps_done + 2, resume=True, **values)
    assert (further.stopped_by, further.losses.size) == ("steps", 2)


def test_gradients_that_are_not_finite_leave_the_last_good_snapshot_to_go_on_from(tmp_path):
    class Breaking(Linear):
        def apply(self, params, batch_stats, images, train):
            logits, stats = super().apply(params, batch_stats, images, train)
            return logits * jax.numpy.where(batch_stats["batches"] >= 5, jax.numpy.nan, 1.0), stats

    config = toy_config(steps=9, run_dir=tmp_path, snapshot_every_steps=2, prefetch=1)
    with pytest.raises(NonFiniteError, match="NaN or infinite at step 6") as caught:
        train(config, model=Breaking(), batches=Unhurried(tmp_path, 2, pulls=1))
    (step,) = snapshot_steps(tmp_path / "snapshots")[-1:]
    assert step in (2, 4)
    assert f"the last good snapshot is from step {step}" in caught.value.__notes__[0]
    end = json.loads((tmp_path / "result.json").read_text())
    assert (end["snapshot_step"], end["first_nonfinite_step"], end["num_skipped"]) == (step, 6, 1)
    result = train(replace(config, resume=True, stop_on_nan=False), model=Breaking(), batches=toy_batch)
    assert (result.steps_done, result.num_skipped, result.stopped_by) == (9, 4, "steps")


def test_a_program_is_traced_once_across_evaluations_snapshots_requests_and_other_rates(tmp_path):
    model = Linear()

    def asking(step):
        if step == 3:
            send_request(tmp_path, ControlRequest(learning_rate_factor=0.5, evaluate=True, snapshot=True))
            time.sleep(1)
        return toy_batch(step)

    config = toy_config(steps=8, run_dir=tmp_path, eval_every_steps=3, snapshot_every_steps=2, schedule="one-cycle")
    result = train(config, model=model, batches=asking, evaluation=EVALUATED)
    # The request takes effect when its step is pulled, which may be one that is evaluated anyway.
    (event,) = read_events(tmp_path / "control.jsonl")
    assert [each.step for each in result.evaluations] == sorted({3, 6, 8, event.step})
    # The forward pass of the training, and that of the evaluation.
    assert model.traces == [True, False]
    again = replace(config, steps=9, learning_rate=0.3, eval_every_steps=2, snapshot_every_steps=1, resume=True)
    assert train(again, model=Linear(), batches=toy_batch, evaluation=EVALUATED).from_cache


HERE = Topology("cpu")


def recorded(config, *earlier):
    return RecordedRun(config, HERE.to_json(), None, {}, recorded_versions(), earlier)


def test_an_interrupted_launch_leaves_no_trace():
    first, second, third = (toy_config(learning_rate=rate) for rate in (0.1, 0.2, 0.3))
    earlier = note_changes(recorded(first), second, 6, HERE)
    assert earlier == [{"until_step": 6, "settings": {"learning_rate": 0.1}}]
    # Its snapshot was lost: the run goes on from an earlier one, with a third rate.
    earlier = note_changes(recorded(second, *earlier), third, 4, HERE)
    rates = [recorded(third, *earlier).config_at(step).learning_rate for step in (1, 4, 5, 9)]
    assert rates == [0.1, 0.1, 0.3, 0.3]
    assert note_changes(recorded(second, *earlier), third, 0, HERE) == []


def test_other_devices_and_processes_are_noted():
    config, before = toy_config(), Topology("cpu", 4, 2)
    earlier = note_changes(replace(recorded(config), resolved=before.to_json()), config, 6, HERE)
    assert earlier == [{"until_step": 6, "settings": {}, "topology": before.to_json()}]
    run = recorded(config, *earlier)
    assert [run.topology_at(step) for step in (1, 6, 7)] == [before, before, HERE]
    # A replay has all devices in one process.
    assert [run.replayed_config(step).devices for step in (6, 7)] == ["cpu:4", None]
    assert [each.devices for each in run.replayed_configs(0, None)] == ["cpu:4", None]
    # Of other launches, nothing is needed.
    assert [each.devices for each in run.replayed_configs(0, 6)] == ["cpu:4"]
    assert [each.devices for each in run.replayed_configs(6, 9)] == [None]


@pytest.mark.parametrize(
    ("change", "digest", "message"),
    [
        ({"batch": 32}, "a" * 64, r"this one has batch 32, not 8, as the first process has: start them"),
        ({"learning_rate": 0.3, "seed": 1}, "a" * 64, r"has seed 1, not 0 and learning_rate 0.3, not 0.1, as"),
        ({}, "b" * 64, r"has data \(the digest of the manifest\) b+, not a+, as the first"),
    ],
)
def test_a_process_with_other_settings_or_data_is_refused(change, digest, message, monkeypatch):
    said = []

    def exchange(subject, text):
        said.append(text)
        return [said[0], text]

    monkeypatch.setattr("loopfeed.engine.run.changes.exchange", exchange)
    config = toy_config()
    check_same_everywhere(config, "a" * 64)
    check_same_everywhere(replace(config, run_dir="/elsewhere", reader_threads=7), "a" * 64)
    with pytest.raises(ConfigError, match=message):
        check_same_everywhere(replace(config, **change), digest)


def test_processes_may_have_a_table_at_other_places_but_not_another_table(monkeypatch):
    said = []

    def exchange(subject, text):
        said.append(text)
        return [said[0], text]

    monkeypatch.setattr("loopfeed.engine.run.changes.exchange", exchange)
    own = {SAMPLING_DIGEST: "a" * 64}
    check_same_everywhere(toy_config(sampling="/here/own.csv"), None, own)
    check_same_everywhere(toy_config(sampling="/there/own.csv"), None, own)
    with pytest.raises(ConfigError, match=r"has the weights in the file of --sampling \(their digest\) b+, not a+, as"):
        check_same_everywhere(toy_config(sampling="/here/own.csv"), None, {SAMPLING_DIGEST: "b" * 64})
    with pytest.raises(ConfigError, match="has sampling balanced, not a table and the weights in the file"):
        check_same_everywhere(toy_config(sampling="balanced"), None)


@pytest.mark.parametrize(
    ("recorded", "device", "num_parts", "promise"),
    [
        (Topology("cpu"), "cpu", 1, "recorded and replayed on one device (cpu): the same bits are expected"),
        (Topology("cpu", 2, 2), "cpu", 2, "on as many in one process: the same bits are expected"),
        (Topology("cpu", 3, 3), "cpu", 3, "sums over the devices may be added in another order"),
        (Topology("cpu", 2), "cpu", 4, "with 4, more than cores, which divides the work of a device in another way"),
        (Topology("cpu", 4), "cpu", 4, "the same bits are expected"),
        (Topology("NVIDIA H100", 8), "cpu", 8, "another kind of device rounds differently"),
        (Topology("NVIDIA H100", 2, 2), "NVIDIA H100", 0, "the same bits are expected"),
    ],
)
def test_a_replay_promises_what_its_devices_allow(recorded, device, num_parts, promise, monkeypatch):
    monkeypatch.setattr("loopfeed.engine.records.machine.num_cores", lambda: 2)
    assert promise in describe_promise(recorded, device, num_parts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1}\n', "must have the 2 lines written before the newest snapshot, but has 1"),
        ('{"step": 1}\n{"step": 3}\n', "must have step 2 in line 2"),
        ('{"step": 1}\nnonsense\n', "must have step 2 in line 2"),
    ],
)
def test_a_loss_log_that_lacks_lines_is_refused_before_anything_is_cut(tmp_path, text, message):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "loss.jsonl").write_text(text)
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=message):
        find_cuts(tmp_path, Resume(step=2))
    assert (tmp_path / "loss.jsonl").read_text() == text
    assert (tmp_path / "result.json").exists()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"config": {"stops": 5}}', "\xff"])
def test_an_unreadable_record_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json cannot be read \("):
        read_recorded(tmp_path)


def test_a_snapshot_that_cannot_be_written_is_a_warning_and_the_last_good_one_stays(tmp_path, monkeypatch):
    def write(folder, step, pulls, tree, state=None):
        if step > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_snapshot(folder, step, pulls, tree, state)

    monkeypatch.setattr("loopfeed.engine.run.recorder.SnapshotWriter", partial(SnapshotWriter, write=write))
    told: list[str] = []

    def batches(step):
        deadline = time.monotonic() + 60
        while step == 3 and snapshot_steps(tmp_path / "snapshots") != [2] and time.monotonic() < deadline:
            time.sleep(0.005)
        return toy_batch(step)

    config = toy_config(steps=6, run_dir=tmp_path, snapshot_every_steps=2, prefetch=1)
    result = train(config, model=Linear(), batches=batches, notify=told.append)
    assert (result.steps_done, result.stopped_by, result.snapshot_step) == (6, "steps", 2)
    assert snapshot_steps(tmp_path / "snapshots") == [2]
    warnings = [line for line in told if line.startswith("snapshot of step 6 not written")]
    assert "No space left on device" in warnings[0]
    assert warnings[0].endswith("the last good one, of step 2, is kept")
    assert (tmp_path / "model.safetensors").exists()
