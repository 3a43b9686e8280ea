"""A run killed by SIGKILL at critical instants resumes bit for bit.

The process kills itself just before a chosen call, so that each instant is hit on any machine. Kills at random times
are tested by `scripts/torture --only kills`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loopfeed.engine.records.control_log import read_events
from loopfeed.engine.records.snapshot import snapshot_steps
from tests.killed_run import ACCUMULATE, EVAL_EVERY, SNAPSHOT_EVERY, STEPS, read_outcome, train_here

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, cache):
    run = tmp_path_factory.mktemp("uninterrupted")
    train_here(run, cache)
    return read_outcome(run)


def train_and_die(run, cache, death):
    command = [sys.executable, "-m", "tests.killed_run", run, cache, json.dumps(death)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout


def resume(run, cache):
    said: list[str] = []
    train_here(run, cache, resume=True, notify=said.append)
    return "\n".join(said)


def num_lines(path):
    return path.read_bytes().count(b"\n")


def test_the_uninterrupted_run_is_what_its_settings_say(uninterrupted):
    _, losses, evaluations = uninterrupted
    assert [step for step, _, _ in losses] == list(range(1, STEPS + 1))
    assert [line["step"] for line in evaluations] == list(range(EVAL_EVERY, STEPS + 1, EVAL_EVERY))


# What each launch of one run dies at, and from where it had begun.
DEATHS = [
    ({"event": "os.rename", "path": r"config\.json$"}, None),  # nothing is there to be resumed
    ({"event": "write", "path": '"step": 3,'}, None),  # no snapshot yet, and a line in half
    ({"event": "write", "path": '"step": 13,', "after": "snapshots/8"}, "from its beginning"),  # behind a snapshot
    ({"event": "os.truncate", "path": r"eval\.jsonl$"}, "of step 8"),  # the losses are cut back, evaluations not
    ({"event": "os.rename", "path": "/16$"}, "of step 8"),  # a snapshot is written and not in its place yet
    ({"event": "os.rename", "path": r"model\.safetensors$"}, "of step 8"),
    ({"event": "os.rename", "path": r"result\.json$"}, "of step 24"),
]


def test_a_run_killed_seven_times_ends_like_an_uninterrupted_one(tmp_path, cache, uninterrupted):
    for number, (death, start) in enumerate(DEATHS):
        said = train_and_die(tmp_path, cache, death)
        assert start in said if start else "resuming" not in said
        assert not (tmp_path / "result.json").exists()
        if number == 0:
            with pytest.raises(ValueError, match=r"contains no config\.json: .*start a run without resume=True"):
                resume(tmp_path, cache)
        if number in (1, 2):
            assert not (tmp_path / "loss.jsonl").read_bytes().endswith(b"\n")
        if number == 3:
            assert (num_lines(tmp_path / "loss.jsonl"), num_lines(tmp_path / "eval.jsonl")) == (8, 2)
        if number == 4:
            assert (tmp_path / "snapshots/.unfinished").exists()
            assert snapshot_steps(tmp_path / "snapshots") == [8]
    assert f"from the snapshot of step {STEPS}" in resume(tmp_path, cache)
    assert read_outcome(tmp_path) == uninterrupted


def test_requests_that_took_effect_after_the_last_snapshot_are_repeated(tmp_path, cache, uninterrupted):
    train_and_die(tmp_path / "killed", cache, "requested")
    (event,) = read_events(tmp_path / "killed/control.jsonl")
    assert snapshot_steps(tmp_path / "killed/snapshots") == [SNAPSHOT_EVERY]
    assert event.pull >= SNAPSHOT_EVERY * ACCUMULATE
    assert num_lines(tmp_path / "killed/loss.jsonl") > event.step
    # What a kill before the first step leaves of a run that was asked: it repeats the request, and was never resumed
    # from a snapshot.
    (tmp_path / "whole").mkdir()
    for name in ("config.json", "control.jsonl"):
        shutil.copy(tmp_path / "killed" / name, tmp_path / "whole" / name)
    train_here(tmp_path / "whole", cache, resume=True)
    resume(tmp_path / "killed", cache)
    whole = read_outcome(tmp_path / "whole")
    assert read_outcome(tmp_path / "killed") == whole
    # And these are the effects that were asked for.
    _, losses, evaluations = whole
    _, plain_losses, plain_evaluations = uninterrupted
    assert losses[: event.step - 1] == plain_losses[: event.step - 1]
    rates, plain_rates = ([rate for _, _, rate in each[event.step - 1 :]] for each in (losses, plain_losses))
    assert rates == pytest.approx([0.25 * rate for rate in plain_rates], rel=1e-6)  # printed in float32's digits
    assert {line["step"] for line in evaluations} == {line["step"] for line in plain_evaluations} | {event.step}


def test_a_finished_run_stays_as_it_is_when_resumed_and_goes_back_where_its_last_snapshot_is_damaged(
    tmp_path, cache, uninterrupted
):
    train_here(tmp_path, cache)
    before = {name: (tmp_path / name).read_bytes() for name in ("loss.jsonl", "eval.jsonl", "model.safetensors")}
    resume(tmp_path, cache)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    stored = max((tmp_path / f"snapshots/{STEPS}/state").rglob("d/*"), key=lambda path: path.stat().st_size)
    os.truncate(stored, stored.stat().st_size // 2)
    said = resume(tmp_path, cache)
    assert "is damaged and cannot be used" in said
    assert f"from the snapshot of step {2 * SNAPSHOT_EVERY}" in said
    assert read_outcome(tmp_path) == uninterrupted
    assert snapshot_steps(tmp_path / "snapshots") == [2 * SNAPSHOT_EVERY, STEPS]
