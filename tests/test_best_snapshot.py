"""The best snapshot: which one it is, that it is kept beside the newest, and the export of its weights."""

import json
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from loopfeed import evaluate, train
from loopfeed.engine.commands.export_cli import main
from loopfeed.engine.loggers.event_command import EventCommand
from loopfeed.engine.objective.best_metric import parse_metric
from loopfeed.engine.objective.metrics import confusion_matrix
from loopfeed.engine.records import snapshot_weights
from loopfeed.engine.records.evaluation_log import best_evaluation, best_step, value_of
from loopfeed.engine.records.snapshot import snapshot_steps
from loopfeed.engine.records.snapshot_weights import find_best
from loopfeed.engine.records.weights import read_weights
from loopfeed.engine.settings import SettingError
from loopfeed.engine.stream.sinks import EvaluationRecord
from tests.test_tally import evaluation_set
from tests.toy import Linear, toy_batch, toy_config


def record(step, **values):
    return EvaluationRecord(**({"step": step, "num_images": 1, "top1": 0.5, "top5": 1, "loss": 1, "time": 0} | values))


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("top1", 4), ("top5", 2), ("loss", 6), ("error:min", 4), ("error:max", 2), ("other:max", None)],
)
def test_the_best_step_has_the_best_number_and_is_the_earliest_of_equals(metric, expected, monkeypatch):
    evaluations = [
        record(2, top1=0.25, loss=0.9, metrics={"error": 3.0}),
        record(4, top1=0.75, loss=float("nan"), metrics={"error": 1.0}),
        record(5, top1=1.0, loss=0.0, metrics={"error": 0.0}),  # without a snapshot
        record(6, top1=0.75, loss=0.5, metrics={"error": 1.0}),
        record(8, top1=float("nan"), loss=float("-inf"), metrics={"error": float("inf")}),  # null in the log
    ]
    assert best_step(evaluations, [2, 4, 6, 8], parse_metric(metric)) == expected
    # A command at events is told of the same one last.
    events, told = EventCommand("", metric), list[float]()
    monkeypatch.setattr(events, "tell", lambda *_, **values: told.append(values["value"]))
    with_snapshots = [each for each in evaluations if each.step != 5]
    for each in with_snapshots:
        events.write_evaluation(each)
    best = best_evaluation(with_snapshots, parse_metric(metric))
    assert told[-1:] == ([] if best is None else [value_of(parse_metric(metric), best)])
    assert (told, len(told)) == (sorted(set(told), reverse=metric in ("loss", "error:min")), len({*told}))


def test_the_best_snapshot_of_a_run_without_classes_has_the_least_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_weights, "read_recorded", lambda _: SimpleNamespace(config=toy_config()))
    unranked = {"top1": math.nan, "top5": math.nan}
    lines = [record(step, loss=loss, **unranked).to_json() for step, loss in ((2, 0.5), (4, 0.25), (6, 0.125))]
    (tmp_path / "eval.jsonl").write_text("\n".join([*lines, ""]))
    for step in (2, 4):
        (tmp_path / "snapshots" / str(step)).mkdir(parents=True)
    said: list[str] = []
    assert (find_best(tmp_path, None, said.append), said) == (4, ["best snapshot: step 4, loss 0.25"])
    (tmp_path / "eval.jsonl").unlink()
    with pytest.raises(ValueError, match="none was evaluated: choose a step"):
        find_best(tmp_path, None, said.append)


@pytest.mark.parametrize("text", ["top2", "error", "error:best", "top1:max", ":max", "a b:max"])
def test_another_metric_is_refused(text):
    with pytest.raises(ValueError, match="a metric must be top1, top5, loss, or a metric of your own"):
        parse_metric(text)
    with pytest.raises(SettingError, match="the setting keep_best"):
        train(toy_config(keep_best=text), model=Linear(), batches=toy_batch)


def test_a_metric_that_the_run_lacks_is_refused():
    with pytest.raises(SettingError, match="keep_best must name a metric of the run, got 'error'"):
        train(toy_config(keep_best="error:min"), model=Linear(), batches=toy_batch)


def _targets(step):
    words, labels = toy_batch(step)
    return words, np.eye(3, dtype=np.float32)[labels]


TARGETS = {"batches": _targets, "evaluation": _targets(99)}
MATRIX = {"evaluation": toy_batch(99), "metrics": {"matrix": confusion_matrix(3)}}


@pytest.mark.parametrize(
    ("metric", "parts", "has_folder", "message"),
    [
        ("loss", {"evaluation": toy_batch(99)}, False, "keep_best needs a run folder, got none"),
        ("loss", {}, True, r"keep_best needs images to evaluate on, but the data \(.*\) have none, got 'loss'"),
        ("top1", TARGETS, True, "keep_best needs images with one class each for top1"),
        ("matrix:max", MATRIX, True, "must name a metric that is one number, got 'matrix', which is an array"),
    ],
)
def test_a_metric_that_no_evaluation_has_is_refused(tmp_path, metric, parts, has_folder, message):
    config = toy_config(keep_best=metric, run_dir=tmp_path / "run" if has_folder else None)
    with pytest.raises(SettingError, match=message):
        train(config, **{"model": Linear(), "batches": toy_batch} | parts)
    assert not (tmp_path / "run" / "config.json").exists()


class CountedSteps(list[int]):
    """Steps that count how often they are iterated over."""

    num_iterations = 0

    def __iter__(self):
        self.num_iterations += 1
        return super().__iter__()


def test_the_steps_are_read_once_for_all_evaluations():
    steps = CountedSteps(range(50))
    evaluations = [EvaluationRecord(step, 8, 0.5, 0.5, 1.0 - step / 100, 0.0) for step in range(50)]
    assert best_step(evaluations, steps, parse_metric("loss")) == 49
    assert steps.num_iterations == 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run of five launches, each with an evaluation and a snapshot at its end, and the best of its steps.

    A launch's last snapshot is always written, however slow the disk is. The loss rises again with the learning rate.
    """
    folder = tmp_path_factory.mktemp("best") / "run"
    config = toy_config(run_dir=folder, keep_snapshots=1, keep_best="loss", schedule="constant", ema_decay=0.5)
    weights = {}
    for step in (2, 4, 6, 8, 10):
        train(
            replace(config, steps=step, resume=step > 2, learning_rate=0.001 if step < 5 else 20.0),
            model=Linear(),
            batches=toy_batch,
            evaluation=evaluation_set(11),
        )
        weights[step] = load_file(folder / "model.safetensors")
    losses = {row["step"]: row["loss"] for row in map(json.loads, (folder / "eval.jsonl").read_text().splitlines())}
    return folder, min(losses, key=lambda step: losses[step]), weights


def invoke(monkeypatch, folder, *arguments):
    codes: list[int] = []
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, "_exit", codes.append)
    result = CliRunner().invoke(main, list(map(str, arguments)))
    return (codes or [result.exit_code])[0], result.stdout, result.stderr


def test_the_best_snapshot_is_kept_beside_the_newest_and_exported(run, monkeypatch):
    folder, best, weights = run
    assert best < 8
    assert snapshot_steps(folder / "snapshots") == [best, 10]
    code, out, err = invoke(monkeypatch, folder.parent, "run", "--snapshot", "best", "best.safetensors")
    assert code == 0, err
    assert out.startswith(f"best.safetensors: safetensors, the weights after {best} steps, ")
    assert f"best snapshot: step {best}, loss " in err
    stored = read_weights(folder.parent / "best.safetensors")
    assert stored.digest is not None
    assert stored.metadata["steps_done"] == str(best)
    for name, tensor in weights[best].items():  # the moving average
        np.testing.assert_array_equal(stored.tensors[name], tensor, strict=True)


def test_the_best_snapshot_is_evaluated_as_the_run_did(run):
    folder, best, _ = run
    said: list[str] = []
    result = evaluate(folder, model=Linear(), evaluation=evaluation_set(11), snapshot="best", notify=said.append)
    recorded = {row["step"]: row["loss"] for row in map(json.loads, (folder / "eval.jsonl").read_text().splitlines())}
    assert result.record.loss == recorded[best]
    assert said[0].startswith(f"best snapshot: step {best}, loss ")


def test_the_weights_of_the_last_step_are_the_file_of_the_run_byte_for_byte(run, monkeypatch):
    folder, _, _ = run
    code, _, err = invoke(monkeypatch, folder.parent, "run", "--snapshot", 10, "last.safetensors")
    assert code == 0, err
    assert (folder.parent / "last.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    code, _, err = invoke(monkeypatch, folder.parent, "run", "--snapshot", 10, "last.safetensors")
    assert (code, "OUT must be a new file, but last.safetensors exists" in err) == (2, True)
    assert invoke(monkeypatch, folder.parent, "run", "--snapshot", 10, "last.safetensors", "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--snapshot", "3", "x"], "there is no snapshot"),
        (["run", "--snapshot", "x", "x"], "must be a step or best, got x: give the number of a kept snapshot"),
        (
            ["run", "--snapshot", "10", "--metric", "loss", "x"],
            "--metric can be given only with the snapshot best, got 10",
        ),
        (["run", "--snapshot", "best", "--metric", "error:min", "x"], "none has error in eval.jsonl: choose a step"),
        (["run", "--snapshot", "10", "no/x"], "OUT must be in an existing folder, but no is missing: create it"),
        (["nowhere", "--snapshot", "10", "x"], "RUN must be a run folder, but nowhere does not exist"),
    ],
)
def test_wrong_usage_is_one_clear_error(run, monkeypatch, arguments, message):
    code, out, err = invoke(monkeypatch, run[0].parent, *arguments)
    assert (code, out) == (2, "")
    assert message in err
