"""Tests of reading, evaluating, resuming, following, controlling and replaying a run folder of an earlier release.

`tests/recorded/run_3218942.zip` has a run of commit 3218942, whose runs have no digests: a ResNet-8 in which all but a
few channels were initialised to zero, 12 steps of 8 images, snapshots and evaluations after steps 6 and 12, and half
the learning rate on request from step 5. It also has the data: 24 and 12 images of 8 px whose colour shows the class.
Nothing here depends on the processor; scripts/compare-releases tests what must be bit-identical on one machine.
"""

import json
import os
import shutil
import threading
import time
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from loopfeed import TrainResult, replay_run, run_settings, train
from loopfeed.engine.commands import cli, control_cli, eval_cli, tail_cli, verify_cli
from loopfeed.engine.control.request import ControlRequest
from loopfeed.engine.records.control_log import read_events
from loopfeed.engine.records.control_requests import send_request
from loopfeed.engine.records.folder_lock import is_locked
from loopfeed.engine.records.snapshot import read_snapshot, snapshot_steps

LOGS = ("loss.jsonl", "eval.jsonl", "control.jsonl")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a folder with `run` and `data`, which is the working directory."""
    with zipfile.ZipFile(Path(__file__).parent / "recorded/run_3218942.zip") as recorded:
        recorded.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def invoke(monkeypatch):
    """Return a function that runs a command in this process and returns its exit code, stdout and stderr."""

    def run(command, *arguments):
        codes: list[int] = []
        monkeypatch.setattr(os, "_exit", codes.append)
        result = CliRunner().invoke(command.main, list(map(str, arguments)))
        return (codes or [result.exit_code])[0], result.stdout, result.stderr

    return run


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def logs(run):
    return {name: (run / name).read_bytes() for name in LOGS}


def test_an_evaluation_of_its_weights_equals_the_recorded_one(place, invoke):
    code, stdout, stderr = invoke(eval_cli, "run", "--data", "data", "--json")
    assert code == 0, stderr
    found, recorded = json.loads(stdout), lines(place / "run/eval.jsonl")[-1]
    # The two largest logits of each image differ by 0.17, so no order of summation changes a count. The loss is a mean
    # of 12 float32 numbers after nine layers, whose rounding errors are below 1e-5 of it.
    assert [found[name] for name in ("step", "num_images", "top1", "top5")] == [12, 12, 1.0, None]
    assert found["loss"] == pytest.approx(recorded["loss"], rel=1e-4)
    assert "resnet8 after 12 steps (no digest: unchecked)" in stderr


@pytest.mark.integration
def test_an_old_run_is_resumed_for_more_steps(place, invoke):
    run = place / "run"
    before = logs(run)
    assert {name: content.count(b"\n") for name, content in before.items()} == dict(zip(LOGS, (12, 2, 1), strict=True))
    code, _, stderr = invoke(cli, "--run-dir", "run", "--resume", "--data", "data", "--steps", 18)
    assert code == 0, stderr
    for name, content in logs(run).items():
        assert content.startswith(before[name]), name
    losses = lines(run / "loss.jsonl")
    assert [line["step"] for line in losses] == list(range(1, 19))
    assert [line["lr"] for line in losses] == [0.1] * 4 + [0.05] * 14
    assert [line["step"] for line in lines(run / "eval.jsonl")] == [6, 12, 18]
    assert snapshot_steps(run / "snapshots") == [6, 12, 18]
    assert json.loads((run / "result.json").read_text())["steps_done"] == 18
    # Its record has no such setting, because there was one kind only.
    assert json.loads((run / "config.json").read_text())["config"]["kernels"] == "xla"
    code, stdout, stderr = invoke(verify_cli, "run", "--from", 12, "--data", "data")
    assert code == 0, stderr
    assert stdout.startswith("the same bits: 6 losses, 1 evaluation, ")


def test_an_old_run_is_resumed_from_an_earlier_snapshot_like_a_killed_run(place, invoke):
    run = place / "run"
    before = logs(run)
    shutil.rmtree(run / "snapshots/12")
    for name in ("model.safetensors", "result.json"):
        (run / name).unlink()
    code, _, stderr = invoke(cli, "--run-dir", "run", "--resume", "--data", "data")
    assert code == 0, stderr
    kept, now = (each["loss.jsonl"].splitlines() for each in (before, logs(run)))
    assert now[:6] == kept[:6]
    assert [json.loads(line)["step"] for line in now] == list(range(1, 13))
    assert logs(run)["control.jsonl"] == before["control.jsonl"]
    assert [json.loads(line)["lr"] for line in now[6:]] == [0.05] * 6
    assert lines(run / "eval.jsonl")[1]["top1"] == 1.0


def test_an_old_run_is_followed(place, invoke):
    code, stdout, stderr = invoke(tail_cli, "run", "--once", "--log-every", "1")
    assert (code, stderr) == (0, "run done after 12 steps\n")
    steps = [line for line in stdout.splitlines() if line.startswith("step ")]
    assert len(steps) == 12
    assert steps[-1].startswith("step 12/12  loss 0.5244  lr 0.05  ")
    assert "evaluation at step 12: top-1 100.00 %" in stdout


def differing_counts(run, other):
    """Return how many losses, learning rates, evaluations and arrays of steps 7 to 12 differ between two runs."""
    ours, theirs = (lines(each / "loss.jsonl")[6:] for each in (run, other))
    evaluated = [lines(each / "eval.jsonl")[1] for each in (run, other)]
    arrays, wanted = (read_snapshot(each / "snapshots", 12).leaves for each in (run, other))
    counts = {
        "loss": sum(a["loss"] != b["loss"] for a, b in zip(ours, theirs, strict=True)),
        "learning rate": sum(a["lr"] != b["lr"] for a, b in zip(ours, theirs, strict=True)),
        "evaluation": int(any(evaluated[0][name] != evaluated[1][name] for name in ("num_images", "top1", "loss"))),
        "array": sum(arrays[name].tobytes() != wanted[name].tobytes() for name in arrays.keys() | wanted.keys()),
    }
    return {kind: count for kind, count in counts.items() if count}


@pytest.mark.integration
def test_a_replay_finds_the_differences_that_a_second_training_has(place, invoke):
    """Whether the bits are those of the recorded run depends on the processor; what the replay computes does not."""
    run, again = place / "run", place / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "snapshots/12")
    for name in ("model.safetensors", "result.json"):
        (again / name).unlink()
    code, _, stderr = invoke(cli, "--run-dir", "again", "--resume", "--data", "data")
    assert code == 0, stderr
    recorded, trained = ([line["loss"] for line in lines(each / "loss.jsonl")] for each in (run, again))
    # Six updates that halve the loss: rounding errors of 1e-6 may grow a hundredfold on another processor.
    assert trained == pytest.approx(recorded, rel=1e-3)
    num_arrays = len(read_snapshot(run / "snapshots", 12).leaves)
    for original, expected in ((run, differing_counts(run, again)), (again, {})):
        report = replay_run(original, from_step=6, data="data")
        assert {each.kind: each.count for each in report.differences} == expected
        assert report.is_same == (not expected)
        assert (report.from_step, report.to_step) == (6, 12)
        assert (report.num_losses, report.num_evaluations, report.num_arrays) == (6, 1, num_arrays)


def test_a_replay_finds_an_altered_loss_and_reports_that_files_have_no_digests(place, invoke):
    path = place / "run/loss.jsonl"
    records = path.read_text().splitlines(keepends=True)
    altered = json.dumps(json.loads(records[6]) | {"loss": 9.0}) + "\n"
    path.write_text("".join([*records[:6], altered, *records[7:]]))
    code, stdout, stderr = invoke(verify_cli, "run", "--data", "data")
    assert code == 1
    assert stdout.startswith("differs: loss of step 7: recorded 9.0, replayed 0.")
    assert "not as written" not in stdout
    assert "files: 2 match their digests (a snapshot counts as one file)" in stderr
    assert "loss.jsonl, eval.jsonl, control.jsonl cannot be checked: they have no digest (yet)" in stderr


@contextmanager
def resumed(run, **values):
    """Resume a run in the background; yield the list that will have its result."""
    config = replace(run_settings(run), data=str(run.parent / "data"), resume=True, **values)
    results: list[TrainResult] = []
    training = threading.Thread(target=lambda: results.append(train(config)), daemon=True)
    training.start()
    deadline = time.monotonic() + 60
    try:
        while not is_locked(run):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        yield results
    finally:
        if not results and is_locked(run):
            send_request(run, ControlRequest(stop=True))
        training.join(60)
    assert not training.is_alive()


@pytest.mark.timeout(180)
def test_a_resumed_run_is_controlled(place, invoke):
    run = place / "run"
    before = logs(run)
    with resumed(run, steps=10**6, eval_every_steps=0, snapshot_every_steps=0) as results:
        for arguments in (["--learning-rate-factor", 2, "--snapshot"], ["--stop"]):
            code, _, stderr = invoke(control_cli, "run", *arguments)
            assert code == 0, stderr
    old, asked, stop = read_events(run / "control.jsonl")
    assert (old.learning_rate_factor, old.step) == (0.5, 5)
    assert (asked.learning_rate_factor, asked.snapshot, stop.stop) == (2, True, True)
    assert {12, asked.step} <= set(snapshot_steps(run / "snapshots"))
    for name, content in logs(run).items():
        assert content.startswith(before[name]), name
    losses = lines(run / "loss.jsonl")
    assert [line["step"] for line in losses] == list(range(1, stop.step))
    assert [losses[step - 1]["lr"] for step in (asked.step - 1, asked.step)] == [0.05, 0.2]
    assert [result.steps_done for result in results] == [stop.step - 1]
