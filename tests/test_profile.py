"""Profiles of real runs: where waiting appears, which steps are traced, and what is written."""

import json
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.profile.profiler import Profiler
from loopfeed.engine.run.profiling import Profiling
from loopfeed.engine.run.train import train
from loopfeed.engine.scopes import ACTIONS
from tests.toy import Linear, toy_batch, toy_config

STEPS, SLEEP_S, EVERY = 18, 0.05, 9


def slow_batch(step):
    time.sleep(SLEEP_S)
    return toy_batch(step)


class SlowSource:
    """A source that sleeps before each batch, and keeps the times at which it gave them."""

    def __init__(self):
        self.times = []

    def __call__(self, step):
        batch = slow_batch(step)
        self.times.append(time.perf_counter())
        return batch


class ProfileSink:
    """A sink that keeps the profile, and how many records came before it."""

    def __init__(self, *, is_broken=False):
        self.num_losses, self.found, self._is_broken = 0, [], is_broken

    def open(self):
        pass

    def write(self, record):
        self.num_losses += 1

    def write_evaluation(self, record):
        pass

    def write_profile(self, profile):
        if self._is_broken:
            raise OSError("the profile's disk is full")
        self.found.append((self.num_losses, profile))

    def close(self):
        pass


def profiled(tmp_path=None, *, batches=toy_batch, evaluation=None, sinks=(), notify=lambda _: None, **values):
    run_dir = None if tmp_path is None else str(tmp_path)
    config = toy_config(**({"steps": STEPS, "profile": True, "run_dir": run_dir} | values))
    return train(config, model=Linear(), batches=batches, evaluation=evaluation, sinks=list(sinks), notify=notify)


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory):
    """Return a run of a source that sleeps before each batch, its folder and a sink of its profile."""
    folder, sink = tmp_path_factory.mktemp("profiled") / "run", ProfileSink()
    result = profiled(
        folder,
        batches=slow_batch,
        evaluation=tuple(np.concatenate([each] * 3) for each in toy_batch(0)),
        sinks=[sink],
        eval_every_steps=EVERY,
        snapshot_every_steps=EVERY,
        flip=0.5,
    )
    return result, folder, sink


def test_every_phase_and_action_has_a_row_with_its_calls(slow_run):
    profile = slow_run[0].profile
    calls = {(row.phase, row.action): row.calls for row in profile.rows}
    assert calls["train", "step"] == calls["train", "draw"] == calls["train", "forward"] == STEPS
    assert calls["valid", "step"] == calls["valid", "predict"] == 3 * 2
    assert calls["fit", "train"] == calls["fit", "valid"] == 2
    # The last state is not pushed by the program.
    assert calls["train", "snapshot"] == 1
    for phase, actions in ACTIONS.items():
        assert {action for each, action in calls if each == phase} >= set(actions)
        assert (phase, "unattributed") in calls


def test_a_sleep_in_the_source_appears_under_draw_step_for_step():
    source = SlowSource()
    result = profiled(batches=source)
    profile: Any = result.profile
    step, draw, batch = (profile.row("train", action) for action in ("step", "draw", "batch"))
    assert draw.calls == STEPS
    # The draw is the wait for the source, and the copy.
    assert result.wait_s - 0.01 <= draw.total_s <= result.wait_s + 0.3 * STEPS * SLEEP_S
    # The source gives a batch every so often, and what the loop does not compute meanwhile, it waits.
    period_s = (source.times[-1] - source.times[0]) / (STEPS - 1)
    assert period_s >= SLEEP_S
    assert draw.total_s / step.total_s == pytest.approx(1 - batch.mean_s / period_s, abs=0.1)


def test_the_rows_add_up_to_the_time_of_the_run(slow_run):
    result = slow_run[0]
    rows = {(row.phase, row.action): row for row in result.profile.rows}
    assert rows["fit", "fit"].total_s == result.train_s
    for phase in ("train", "valid"):
        parts = sum(row.total_s for row in rows.values() if row.phase == phase and row.is_estimated)
        assert parts == pytest.approx(rows[phase, "batch"].total_s)
    inside = ("draw", "batch", "snapshot")
    named = sum(rows[key].total_s for key in rows if key[0] in ACTIONS and key[1] in inside)
    # The rest is the start and the end of the loop, and what follows an evaluation.
    assert named + rows["fit", "unattributed"].total_s == pytest.approx(result.train_s, rel=0.02)


def test_a_profile_changes_no_bit_and_without_it_there_is_none(slow_run, tmp_path):
    result = profiled(tmp_path / "run", profile=False, flip=0.5)
    assert result.profile is None
    assert not (tmp_path / "run/profile.csv").exists()
    assert np.array_equal(result.losses, slow_run[0].losses)


def test_a_resumed_run_is_profiled_from_where_it_resumes(slow_run, tmp_path):
    folder = tmp_path / "run"
    profiled(folder, profile=False, steps=4)
    result = train(
        toy_config(steps=14, profile=True, profile_steps="6:12", run_dir=str(folder), resume=True),
        model=Linear(),
        batches=slow_batch,
    )
    profile: Any = result.profile
    assert profile.row("train", "step").calls == 10
    (traced,) = profile.traced
    # Steps 6 to 11 are the batches 2 to 7 of this launch; the thread that traces may be late.
    assert traced.first >= 2
    assert 1 <= traced.count <= 6
    assert any(f"{traced.count} steps from {traced.first + 4} on" in note for note in profile.notes)
    # By the clock of the trace they took as long as by that of the host. On a busy machine the trace may begin one step
    # before the batch that is counted as its first.
    times = {line["step"]: line["time"] for line in map(json.loads, (folder / "loss.jsonl").read_text().splitlines())}
    before = traced.first + 4
    on_host_s = times[before + traced.count] - times[before]
    assert traced.mean_s * traced.count == pytest.approx(on_host_s, rel=0.05, abs=1.5 * SLEEP_S)


def test_the_sinks_that_take_no_profile_are_closed_while_it_is_collected(monkeypatch):
    class PlainSink:
        def __init__(self):
            self.num_losses, self.closed = 0, threading.Event()

        def open(self):
            pass

        def write(self, record):
            self.num_losses += 1

        def write_evaluation(self, record):
            pass

        def close(self):
            self.closed.set()

    plain, taking, seen = PlainSink(), ProfileSink(), []
    finish = Profiler.finish

    def finish_after_the_losses(profiler, *args):
        seen.append((plain.closed.wait(20), plain.num_losses, profiling[0].is_collecting))
        return finish(profiler, *args)

    profiling, report = [], Profiling.report

    def noted_report(self, *args):
        profiling.append(self)
        report(self, *args)

    monkeypatch.setattr(Profiling, "report", noted_report)
    monkeypatch.setattr(Profiler, "finish", finish_after_the_losses)
    result = profiled(steps=3, sinks=[plain, taking])
    assert seen == [(True, 3, True)]
    assert not profiling[0].is_collecting
    assert taking.found == [(3, result.profile)]


def test_a_trace_that_cannot_be_made_is_reported_and_the_run_goes_on(monkeypatch):
    def refuse():
        raise RuntimeError("another profile is in progress")

    monkeypatch.setattr("loopfeed.engine.profile.capture._start", refuse)
    said: list[str] = []
    result = profiled(steps=4, batches=slow_batch, notify=said.append)
    assert result.steps_done == 4
    assert result.profile.row("train", "step").calls == 4
    assert result.profile.traced == ()
    assert any("could not be traced (RuntimeError: another profile is in progress)" in line for line in said)
    assert any("No batch of the phase train was traced" in note for note in result.profile.notes)


class TwoStages:
    """A model of two stages of dense layers, with so many layers each."""

    def __init__(self, first, second):
        self._depths = {"one": first, "two": second}

    def init(self, key):
        width = 256
        names = [f"{stage}{number}" for stage, depth in self._depths.items() for number in range(depth)]
        keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
        return {name: jax.random.normal(key, (width, width)) / 16 for name, key in keys.items()}, {}

    def apply(self, params, batch_stats, images, train):
        x = jnp.tile(images.reshape(len(images), -1), (1, 6))[:, :256]
        for stage, depth in self._depths.items():
            with jax.named_scope(stage):
                for number in range(depth):
                    x = jnp.tanh(x @ params[f"{stage}{number}"])
        return x[:, :3], batch_stats


def time_of_the_first_stage(depth):
    """Return the time of the first stage, `depth` layers, over that of the second, 4 layers, by action."""
    config = TrainConfig(steps=130, batch=512, num_classes=3, learning_rate=1e-3, profile=True, profile_steps="10:129")
    result = train(config, model=TwoStages(depth, 4), batches=lambda step: toy_batch(step, batch=512))
    profile: Any = result.profile
    found = {(row.action, row.scope): row.mean_s for row in profile.scopes}
    return {action: found[action, "one"] / found[action, "two"] for action in ("forward", "backward")}


@pytest.mark.integration
@pytest.mark.usefixtures("llvms_optimiser")
def test_doubling_a_stage_of_a_model_doubles_its_rows_and_no_others():
    # Both stages are measured in the same steps, so that other work on the machine slows both of them, mostly. Where it
    # does not, another try tells: if rows belonged to other stages, no try would come near to 2.
    tries = []
    for _ in range(4):
        single, double = time_of_the_first_stage(4), time_of_the_first_stage(8)
        tries.append([double[action] / single[action] for action in single])
        if tries[-1] == pytest.approx([2, 2], rel=0.3):
            break
    assert tries[-1] == pytest.approx([2, 2], rel=0.3), f"twice the layers must take twice the time, took {tries}"


def test_on_a_card_steps_are_timed_by_chunks_and_draws_are_the_waits_of_the_device(cards, tmp_path):
    evaluation = tuple(np.concatenate([each] * 3) for each in toy_batch(0))
    result = profiled(
        tmp_path / "run", steps=20, transport="cuda", evaluation=evaluation, eval_every_steps=10, snapshot_every_steps=5
    )
    profile: Any = result.profile
    rows = {(row.phase, row.action): row for row in profile.rows}
    assert rows["train", "step"].calls == rows["train", "draw"].calls == 20
    assert rows["train", "draw"].total_s == pytest.approx(result.wait_s)
    assert rows["fit", "train"].calls == rows["fit", "valid"].calls == 2
    assert rows["train", "snapshot"].calls == 3
    assert ("valid", "draw") not in rows


def test_where_gradients_are_accumulated_the_rows_and_the_notes_count_micro_steps(monkeypatch):
    monkeypatch.setattr("loopfeed.engine.profile.capture._MOST_BATCHES", 6)
    result = profiled(steps=8, batches=slow_batch, accumulate_steps=2, profile_steps="1:2000000000")
    profile: Any = result.profile
    assert profile.row("train", "step") is None
    assert profile.row("train", "micro-step").calls == 16
    assert profile.row("train", "micro-step").mean_s == pytest.approx(
        profile.row("train", "draw").mean_s + profile.row("train", "batch").mean_s
    )
    (traced,) = profile.traced
    assert any(f"trace of {traced.count} micro-steps from {traced.first} on" in note for note in profile.notes)
    asked = "--profile-steps asked for the steps 1 to 1,999,999,999, which are the micro-steps 2 to 3,999,999,999"
    assert f"{asked}; the trace ended at its limit of 6 batches." in profile.notes


def test_the_batches_of_a_chunk_are_steps_of_their_own():
    profile: Any = profiled(steps=40, batches=slow_batch, chunk_batches=4, profile_steps="4:10").profile
    rows = {row.action: row for row in profile.rows if row.phase == "train"}
    assert rows["step"].calls == rows["forward"].calls == 40
    assert rows["step"].std_s is rows["forward"].std_s is None
    (traced,) = profile.traced
    assert traced.first % 4 == traced.count % 4 == 0
    # Whole chunks until six steps are traced.
    assert traced.count == 8
    assert SLEEP_S / 2 < traced.mean_s < 2 * rows["step"].mean_s
