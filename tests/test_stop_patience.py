"""The end of a run whose evaluations no longer become better: counted on the device, exactly over resumes."""

import json
import math
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from loopfeed import Callback, Metric, TrainConfig, replay_run, run_settings, train
from loopfeed.engine.commands.cli import main as run_train
from loopfeed.engine.objective.best_metric import parse_metric
from loopfeed.engine.records.evaluation_log import EvaluationLog, value_of
from loopfeed.engine.records.loss_log import RunEnd
from loopfeed.engine.records.snapshot import read_snapshot, snapshot_steps
from loopfeed.engine.run.changes import check_settings
from loopfeed.engine.settings import SettingError
from tests.fake_source import fake_source, pack
from tests.toy import CLASSES, Linear, toy_batch, toy_config

pytestmark = pytest.mark.usefixtures("small_resnets")

NAN, INF = math.nan, math.inf
# What the evaluation after each step finds.
SCRIPT = (NAN, 0.5, 0.9, 0.9, 0.7, NAN, 1.5, -2.0, 1.4, INF, 1.5, -INF, 1.25, 0.0)
STEPS = len(SCRIPT)


@dataclass
class Scripted(Linear):
    """A linear network whose logits in an evaluation are the number of the script, and zeros."""

    def apply(self, params, batch_stats, images, train):
        logits, new = super().apply(params, batch_stats, images, train)
        if train:
            return logits, new
        found = jnp.asarray(SCRIPT, jnp.float32)[batch_stats["batches"].astype(jnp.int32) - 1]
        return jnp.zeros((len(images), CLASSES)).at[:, 0].set(found), batch_stats


LARGEST = Metric(
    init=lambda: jnp.float32(-INF),
    update=lambda state, outputs, labels, weights: jnp.maximum(
        state, jnp.where(weights > 0, outputs[:, 0], -INF).max()
    ),
    merge=jnp.maximum,
    finish=lambda state: state,
)


def scripted(**values: Any):
    config = toy_config(**{"steps": STEPS, "eval_every_steps": 1} | values)
    parts: dict[str, Any] = {"model": Scripted(), "batches": toy_batch, "evaluation": toy_batch(99, batch=12)}
    return config, parts | {"metrics": {"largest": LARGEST}}


def run(**values: Any):
    config, parts = scripted(**values)
    return train(config, **parts)


def end_of(records, metric, patience):
    """The number of evaluations after which a run ends, and why: the rule in plain Python, over what was logged."""
    best, num_worse = -INF, 0
    for number, record in enumerate(records, start=1):
        value = value_of(parse_metric(metric), record)
        score = value if parse_metric(metric).is_larger_better else -value
        best, num_worse = (score, 0) if score > best else (best, num_worse + 1)
        if num_worse == patience and number < len(records):
            return number, "patience"
    return len(records), "steps"


@pytest.fixture(scope="module")
def everything():
    """The evaluations of a run without a rule."""
    return run().evaluations


def test_the_script_has_what_a_rule_must_not_confuse(everything):
    values = [record.metrics["largest"] for record in everything]
    np.testing.assert_array_equal(values, np.array(SCRIPT, np.float32))
    assert [math.isfinite(record.loss) for record in everything] == [math.isfinite(value) for value in SCRIPT]
    assert len({record.top1 for record in everything}) > 1


@pytest.mark.parametrize(
    ("metric", "patience", "steps"),
    [
        ("largest:max", 1, 1),  # the first evaluation is NaN
        ("largest:max", 3, 6),  # 0.9 again, 0.7, NaN
        ("largest:max", 4, 11),  # 1.5 again after 1.4 and infinity
        ("largest:min", 5, 7),
        ("largest:min", 6, 14),  # at the last step: all steps are done
        ("top1", 2, None),
        (None, 3, None),
    ],
)
def test_a_run_ends_after_so_many_evaluations_that_are_not_better(everything, metric, patience, steps, tmp_path):
    result = run(stop_patience=patience, stop_metric=metric, run_dir=tmp_path / "run")
    expected = end_of(everything, metric or "loss", patience)
    assert (result.steps_done, result.stopped_by) == expected
    assert steps in (None, expected[0])
    assert result.is_complete
    end = json.loads((tmp_path / "run/result.json").read_text())
    assert (end["steps_done"], end["stopped_by"]) == expected
    assert RunEnd(*expected).outcome == "done"


def outcome(folder):
    """What a run leaves: its logs without times, its weights, and its last state."""
    logs = []
    for name in ("loss.jsonl", "eval.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        kept = ("step", "loss", "lr", "top1", "metrics")
        logs.append([{key: line[key] for key in kept if key in line} for line in lines])
    leaves = read_snapshot(folder / "snapshots", snapshot_steps(folder / "snapshots")[-1]).leaves
    state = {name: (leaf.dtype, leaf.tobytes()) for name, leaf in leaves.items()}
    return logs, (folder / "model.safetensors").read_bytes(), state


class StopAt(Callback):
    """Stops a run after a step; its batches wait for that, so that the run has not gone far."""

    def __init__(self, step):
        self._step, self._asked = step, threading.Event()

    def batches(self, step):
        assert step <= self._step + 1 or self._asked.wait(60)
        return toy_batch(step)

    def on_fit_begin(self, run):
        self._run = run

    def on_step(self, record):
        # The step itself may have been the last of the launch before.
        if record.step >= self._step and not self._asked.is_set():
            self._run.request(stop=True)
            self._asked.set()


RULE: dict[str, Any] = {"stop_patience": 4, "stop_metric": "largest:max"}


def test_a_run_that_is_stopped_in_the_middle_of_the_count_ends_like_another(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(**RULE, run_dir=whole).steps_done == 11
    config, given = scripted(**RULE, run_dir=parts, prefetch=1)
    for step in (4, 7):
        stop = StopAt(step)
        stopped = train(replace(config, resume=step > 4), **given | {"batches": stop.batches, "callbacks": [stop]})
        assert stopped.stopped_by == "callback"
        assert step <= stopped.steps_done <= step + 3
    assert train(replace(config, resume=True), **given).stopped_by == "patience"
    (logs, weights, state), (own_logs, own_weights, own_state) = outcome(whole), outcome(parts)
    assert (own_logs, own_weights, own_state) == (logs, weights, state)
    assert np.frombuffer(state["patience.num_worse"][1], np.int32) == 4
    assert replay_run(parts, **given).is_same
    # The ended run ends at once; a larger number goes on counting from there.
    said: list[str] = []
    again = train(replace(config, resume=True), **given, notify=said.append)
    assert any("with 4 evaluations in a row that were not better; give a larger stop_patience" in each for each in said)
    assert (again.stopped_by, again.steps_done, again.losses.size) == ("patience", 11, 0)
    further = train(replace(config, stop_patience=6, resume=True), **given)
    assert (further.stopped_by, further.steps_done) == ("patience", 13)
    assert replay_run(parts, **given).is_same


def test_the_metric_is_that_of_keep_best_when_the_run_began(tmp_path):
    run(stop_patience=3, keep_best="largest:max", run_dir=tmp_path, steps=4)
    assert run_settings(tmp_path).stop_metric == "largest:max"
    result = run(stop_patience=3, keep_best="loss", run_dir=tmp_path, resume=True)
    assert (result.stopped_by, result.steps_done) == ("patience", 6)
    with pytest.raises(SettingError, match="stop_metric was 'largest:max', got 'loss'"):
        run(stop_patience=3, stop_metric="loss", run_dir=tmp_path, resume=True)


@pytest.mark.parametrize(("before", "now"), [(None, 3), (3, None)])
def test_a_rule_can_be_neither_added_nor_removed(before, now):
    with pytest.raises(ValueError, match=rf"stop_patience was {before}, got {now}"):
        check_settings(toy_config(stop_patience=now), toy_config(stop_patience=before))
    check_settings(toy_config(stop_patience=2), toy_config(stop_patience=3))


def test_a_state_without_a_rule_is_as_before(tmp_path):
    run(run_dir=tmp_path, steps=2)
    leaves = read_snapshot(tmp_path / "snapshots", 2).leaves
    assert not [name for name in leaves if "patience" in name]


@pytest.mark.parametrize(
    ("values", "parts", "message"),
    [
        ({}, {"evaluation": None}, r"stop_patience needs images to evaluate on, .* got 2: leave it out, or choose"),
        ({"eval_every_steps": None}, {}, r"needs evaluations before the end of the run, got 2 .*\(eval_every_steps\)"),
        ({"stop_metric": "error:min"}, {}, "stop_metric must name a metric of the run, got 'error'"),
        ({"stop_metric": "best"}, {}, "the setting stop_metric: a metric must be top1, top5, loss, or"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_remedy(values, parts, message):
    config, given = scripted(stop_patience=2, **values)
    with pytest.raises(SettingError, match=message):
        train(config, **given | parts)


def test_a_recipe_and_the_command_line_stop_a_run_and_say_so(tmp_path, monkeypatch):
    """The data have epochs: without a run folder in Python, and with one here, each is evaluated."""
    monkeypatch.chdir(tmp_path)
    for name, count in (("train", 20), ("val", 11)):
        pack(fake_source(count, size=8, name=name), tmp_path / "data")
    Path("mine.toml").write_text(
        'summary = "s"\ncommand = "c"\nexpected = "e"\nsource = "s"\nhardware = "h"\n'
        '[settings]\nmodel = "resnet8"\nbatch = 4\nlearning_rate = 20.0\nsteps = 200\nstop_patience = 3\n'
    )
    done = CliRunner().invoke(
        run_train, ["--recipe", "mine.toml", "--data", "data", "--stop-metric", "top1", "--run-dir", "run"]
    )
    assert done.exit_code == 0, done.output
    assert "done, no better evaluation in time (--stop-patience): " in done.output
    records = EvaluationLog(Path("run/eval.jsonl")).read()
    assert end_of((*records, records[-1]), "top1", 3) == (len(records), "patience")
    end = json.loads(Path("run/result.json").read_text())
    assert (
        RunEnd(end["steps_done"], end["stopped_by"])
        .line()
        .endswith(f"no better evaluation in time (--stop-patience), after {records[-1].step} steps")
    )
    config = TrainConfig(data="data", model="resnet8", batch=4, learning_rate=20, steps=200)
    same = train(replace(config, stop_patience=3, stop_metric="top1"))
    assert (same.stopped_by, same.steps_done) == ("patience", end["steps_done"])


PROGRAM = """
from tests.test_stop_patience import run
result = run(stop_patience=4, stop_metric="largest:max", devices="cpu:2")
print(result.steps_done, result.stopped_by)
"""


@pytest.mark.integration
def test_several_devices_decide_together():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["11 patience"], done.stderr
