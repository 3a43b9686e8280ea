"""Snapshots that no setting asks for: by the clock, within a twentieth of the time, and of the best evaluation."""

import json
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from loopfeed import TrainConfig, train
from loopfeed.engine.control.request import ControlEvent
from loopfeed.engine.objective.best_metric import parse_metric
from loopfeed.engine.records.evaluation_log import EvaluationLog, best_step
from loopfeed.engine.records.snapshot import read_snapshot, snapshot_steps
from loopfeed.engine.run.epochs import SnapshotChoice
from tests.toy import CLASSES, Linear, toy_batch, toy_config

STEPS = 24


class Clock:
    """A clock that a test moves, and the seconds that the program has spent on copies."""

    now = copied_s = 0.0

    def choice(self, is_best=lambda _: False, events=(), **values):
        return SnapshotChoice(TrainConfig(**values), events, is_best, lambda: self.copied_s, clock=lambda: self.now)


@pytest.mark.parametrize(
    ("copy_s", "write_s", "next_s"),
    [(0.0, 0.0, 600.0), (1.0, 20.0, 600.0), (0.0, 30.0, 600.0), (1.0, 30.0, 620.0), (5.0, 115.0, 2400.0)],
)
def test_the_next_snapshot_is_due_in_ten_minutes_or_twenty_times_the_cost_of_the_last(copy_s, write_s, next_s):
    clock = Clock()
    choice = clock.choice()
    choice.start()
    clock.now = 599.9
    assert not choice.is_due(1)
    clock.now = 600.0
    assert choice.is_due(2)
    clock.now = 10_000.0
    assert not choice.is_due(3)  # the last one is still on its way to the disk
    for _ in range(2):  # the cost of a copy counts once
        clock.copied_s += copy_s
        choice.ended(write_s)
        ended = clock.now
        clock.now = ended + next_s - 0.1
        assert not choice.is_due(4)
        clock.now = ended + next_s
        assert choice.is_due(5)
        clock.now += write_s


def request(step):
    """Return the event of a request for a snapshot after a step."""
    return ControlEvent(
        pull=step - 1,
        step=step,
        learning_rate_factor=None,
        snapshot=True,
        evaluate=False,
        stop=False,
        request="a",
        time=0.0,
    )


def test_what_was_asked_for_and_what_is_best_is_written():
    clock = Clock()
    choice = clock.choice(keep_best="top1", is_best=lambda step: step == 4, events=[request(2)])
    choice.start()
    choice.note_event(request(8))
    clock.now = 600.0
    assert choice.is_due(6)
    assert [step for step in range(10) if choice.is_written(step)] == [2, 4, 6, 8]
    for values in ({}, {"keep_best": "top1", "snapshot_every_steps": 3}):
        assert all(clock.choice(**values).is_written(step) for step in range(10))


@pytest.fixture
def at_once(monkeypatch):
    """Make the next snapshot due as soon as the last one is on the disk."""
    monkeypatch.setattr("loopfeed.engine.run.epochs._INTERVAL_S", 0.0)
    monkeypatch.setattr("loopfeed.engine.run.epochs._LARGEST_SHARE", 1e9)


def run(path, *, awaited=0, **values):
    """Train; if `awaited` is not 0, the batch of that step (from 0) comes once a snapshot is on the disk."""

    def batches(step):
        until = time.monotonic() + 60
        while step and step == awaited and not snapshot_steps(path / "snapshots") and time.monotonic() < until:
            time.sleep(0.01)
        return toy_batch(step)

    config = toy_config(**({"steps": STEPS, "run_dir": str(path), "prefetch": 1, "momentum": 0.9} | values))
    return train(config, model=Linear(), batches=batches)


def state_at_end(path):
    return read_snapshot(Path(path) / "snapshots", STEPS).leaves


@pytest.mark.parametrize("settings", [{}, {"chunk_batches": 4}, {"accumulate_steps": 2, "chunk_batches": 3}])
def test_snapshots_by_the_clock_change_no_bit_and_are_no_requests(settings, tmp_path, at_once):
    timed, plain = tmp_path / "timed", tmp_path / "plain"
    run(timed, awaited=16, keep_snapshots=0, **settings)
    run(plain, snapshot_every_steps=0, **settings)
    taken = snapshot_steps(timed / "snapshots")
    assert len(taken) > 1
    assert snapshot_steps(plain / "snapshots") == [STEPS]
    assert not (timed / "control.jsonl").exists()
    assert [json.loads(line)["loss"] for line in (timed / "loss.jsonl").read_text().splitlines()] == [
        json.loads(line)["loss"] for line in (plain / "loss.jsonl").read_text().splitlines()
    ]
    for name, leaf in state_at_end(plain).items():
        np.testing.assert_array_equal(state_at_end(timed)[name], leaf, err_msg=name)


def test_snapshots_by_the_clock_are_bounded_in_number_and_a_run_resumes_from_them(tmp_path, at_once):
    run(tmp_path / "run", awaited=16, steps=20)
    assert 1 < len(snapshot_steps(tmp_path / "run/snapshots")) <= 3
    run(tmp_path / "run", resume=True)
    run(tmp_path / "whole", snapshot_every_steps=0)
    whole, resumed = state_at_end(tmp_path / "whole"), state_at_end(tmp_path / "run")
    assert jax.tree.all(jax.tree.map(np.array_equal, whole, resumed))


def turning_batch(step):
    """Return batches that teach other classes from step 10 on, so that evaluations become worse."""
    pixels, labels = toy_batch(step)
    return pixels, labels if step < 10 else (labels + 1) % CLASSES


@pytest.mark.parametrize("values", [{}, {"chunk_batches": 4}])
def test_the_best_of_all_evaluations_is_kept(values, tmp_path):
    values |= {"steps": STEPS, "eval_every_steps": 2, "keep_best": "loss", "keep_snapshots": 1}
    config = toy_config(run_dir=str(tmp_path), prefetch=1, **values)
    train(config, model=Linear(), batches=turning_batch, evaluation=toy_batch(90, batch=32))
    evaluations = EvaluationLog(tmp_path / "eval.jsonl").read()
    best = best_step(evaluations, [each.step for each in evaluations], parse_metric("loss"))
    assert best in (8, 10, 12)
    assert snapshot_steps(tmp_path / "snapshots") == [best, STEPS]
