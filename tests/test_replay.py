"""The replay of a range of steps: the same bits from any snapshot to any step; every change of a record is found."""

import json
import os
import shutil
import signal
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed import replay_run, train
from loopfeed.engine.control.request import ControlRequest
from loopfeed.engine.records.control_log import read_events
from loopfeed.engine.records.control_requests import send_request
from loopfeed.engine.records.snapshot import read_snapshot, remove_snapshot, snapshot_steps, write_snapshot
from loopfeed.engine.replay.report import Difference, _Kind
from tests.fake_source import fake_source, files_of, pack
from tests.small_resnets import small_resnets
from tests.toy import SIZE, Linear, toy_batch, toy_config

STEPS, PULLS = 9, 2
SETTINGS: dict[str, Any] = {
    "optimizer": "nesterov",
    "schedule": "cosine",
    "warmup_steps": 2,
    "accumulate_steps": PULLS,
    "ema_decay": 0.9,
    "label_smoothing": 0.1,
    "crop": "random",
    "crop_padding": 1,
    "flip": 0.5,
    "mixup": 0.2,
    "eval_every_steps": 3,
    "snapshot_every_steps": 2,
    "keep_snapshots": 0,
    "prefetch": 1,
}
EVALUATED = tuple(np.concatenate([toy_batch(100 + number)[part] for number in range(3)]) for part in (0, 1))


class Unhurried:
    """Toy batches that wait for the snapshots before, and ask for other things at batches where they are told to."""

    def __init__(self, path, requests=None):
        self._path, self._requests = path, requests or {}

    def __call__(self, pull):
        done = pull // PULLS // 2 * 2
        deadline = time.monotonic() + 60
        while done and done not in snapshot_steps(self._path / "snapshots"):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        if pull in self._requests:
            send_request(self._path, self._requests[pull])
            # Until the mailbox has it: this batch, or the next, brings it to the program.
            time.sleep(0.5)
        return toy_batch(pull)


def run(path, *, batches=None, evaluation=EVALUATED, **values):
    config = toy_config(**({"steps": STEPS, "run_dir": path} | SETTINGS | values))
    return train(config, model=Linear(), batches=batches or Unhurried(path), evaluation=evaluation)


def replay(path, **values):
    given: dict[str, Any] = {"model": Linear(), "batches": toy_batch, "evaluation": EVALUATED}
    return replay_run(path, **(given | values))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def change(path, number, **values):
    """Changes values in a line of a log."""
    records = lines(path)
    records[number] |= values
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a run with snapshots of every second step, and requests during the run."""
    path = tmp_path_factory.mktemp("recorded") / "run"
    requests = {
        5: ControlRequest(learning_rate_factor=0.5),
        7: ControlRequest(evaluate=True),
        13: ControlRequest(learning_rate_factor=2.0, snapshot=True),
    }
    run(path, batches=Unhurried(path, requests))
    return path


@pytest.fixture
def copied(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "run")
    return tmp_path / "run"


def test_the_run_to_be_replayed_has_what_the_tests_are_about(recorded):
    assert {2, 4, 6, 8, 9} <= set(snapshot_steps(recorded / "snapshots"))
    assert len(read_events(recorded / "control.jsonl")) == 3
    steps = [record["step"] for record in lines(recorded / "eval.jsonl")]
    assert set(steps) > {3, 6, 9}
    assert len({record["lr"] for record in lines(recorded / "loss.jsonl")}) == STEPS


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (0, 9), (2, 7), (6, 8), (8, 9), (4, 5)])
def test_every_replayed_range_has_the_same_bits_and_the_folder_is_unchanged(recorded, begin, end):
    before = files_of(recorded)
    report = replay(recorded, from_step=begin, to_step=end)
    assert report.is_same, report
    steps = [record["step"] for record in lines(recorded / "eval.jsonl")]
    assert (report.from_step, report.to_step, report.num_losses) == (begin, end, end - begin)
    assert report.num_evaluations == len([step for step in steps if begin < step <= end])
    there = end in snapshot_steps(recorded / "snapshots")
    saved = read_snapshot(recorded / "snapshots", end).leaves if there else ()
    assert report.num_arrays == (len(saved) or None)
    assert files_of(recorded) == before


@pytest.mark.parametrize(
    ("name", "number", "values", "kind", "where"),
    [
        ("loss.jsonl", 4, {"loss": 1.5}, "loss", "step 5"),
        ("loss.jsonl", 4, {"loss": None}, "loss", "step 5"),
        ("loss.jsonl", 6, {"lr": 0.123}, "learning rate", "step 7"),
        ("eval.jsonl", -1, {"top1": 0.0625}, "evaluation", "step 9, top1"),
        ("eval.jsonl", -1, {"loss": 0.5}, "evaluation", "step 9, loss"),
        ("eval.jsonl", -1, {"num_images": 23}, "evaluation", "step 9, num_images"),
    ],
)
def test_one_changed_number_is_found_and_named(copied, name, number, values, kind, where):
    old = lines(copied / name)[number][next(iter(values))]
    change(copied / name, number, **values)
    (found,) = replay(copied).differences
    (new,) = values.values()
    total = 7 if name == "loss.jsonl" else len([e for e in lines(copied / "eval.jsonl") if e["step"] > 2])
    # Of losses and rates, the size of the difference is told, unless it is not finite.
    is_told = new is not None and kind != "evaluation"
    assert found.largest == (pytest.approx(abs(old - new) / new) if is_told else None)
    recorded = "NaN or infinite" if new is None else str(new)
    assert found == Difference(kind, where, recorded, str(old), 1, total, found.largest)


@pytest.mark.parametrize(
    ("recorded", "replayed", "largest"),
    [
        (2.0, 2.5, "by at most 2.5e-01 of their value"),
        (float("nan"), 2.5, None),  # a metric that the record lacks
        (None, 2.5, None),
        (0.0, 2.5, None),
        (2.0, None, None),
    ],
)
def test_the_largest_difference_is_told_if_each_has_a_number(recorded, replayed, largest):
    kind = _Kind("metric")
    kind.compare("step 1", 1.0, 1.125)
    kind.compare("step 2", recorded, replayed)
    told = str(kind.difference())
    assert "2 of 2 metrics differ" in told
    assert (largest in told) if largest else ("by at most" not in told)


def test_the_last_bit_of_a_loss_is_found(copied):
    loss = np.float32(lines(copied / "loss.jsonl")[4]["loss"])
    other = np.nextafter(loss, np.float32(9))
    change(copied / "loss.jsonl", 4, loss=float(str(other)))
    (found,) = replay(copied).differences
    assert (found.recorded, found.replayed) == (str(other), str(loss))
    text = f"loss of step 5: recorded {other!s}, replayed {loss!s}; 1 of 7 losses differ, by at most "
    assert str(found).startswith(text)
    assert 0 < float(str(found).removeprefix(text).removesuffix(" of their value")) < 1.3e-7


def test_one_changed_array_of_the_snapshot_is_found_and_named(copied):
    saved = read_snapshot(copied / "snapshots", 8)
    leaves = dict(saved.leaves)
    leaves["params.weights"] = leaves["params.weights"].copy()
    leaves["params.weights"][1, 2] = 7
    nested: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *above, last = name.split(".")
        inner = nested
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = leaf
    write_snapshot(copied / "snapshots", 8, saved.batch_index, nested)
    report = replay(copied, from_step=6, to_step=8)
    (found,) = report.differences
    assert (found.kind, found.recorded, found.count, found.total) == ("array", "7.0", 1, len(leaves))
    assert found.where == "step 8, params.weights at [1, 2]"


def test_a_missing_or_additional_evaluation_is_found(copied):
    everything = (copied / "eval.jsonl").read_text().splitlines(keepends=True)
    number = [record["step"] for record in lines(copied / "eval.jsonl")].index(6)
    (copied / "eval.jsonl").write_text("".join(everything[:number] + everything[number + 1 :]))
    (found,) = replay(copied, from_step=4).differences
    assert (found.kind, found.where, found.recorded, found.replayed) == ("evaluation", "step 6", "nothing", "one")
    records = [json.loads(line) for line in everything]
    records.insert(number + 1, records[number] | {"step": 7})
    (copied / "eval.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (found,) = replay(copied, from_step=4).differences
    assert (found.kind, found.where, found.recorded, found.replayed) == ("evaluation", "step 7", "one", "nothing")


def test_a_missing_request_is_detected(copied):
    (copied / "control.jsonl").unlink()
    kinds = {difference.kind for difference in replay(copied, from_step=0).differences}
    assert kinds >= {"learning rate", "loss", "array", "evaluation"}


def test_the_end_of_a_killed_run_is_compared_as_far_as_it_goes(copied):
    """Its last loss is there, its evaluation is not, nor is any snapshot of it; a line is torn."""
    for step in (8, 9):
        remove_snapshot(copied / "snapshots", step)
    for name in ("result.json", "model.safetensors"):
        (copied / name).unlink()
    text = (copied / "eval.jsonl").read_text().splitlines(keepends=True)
    (copied / "eval.jsonl").write_text("".join(text[:-1]) + text[-1][:20])
    with (copied / "loss.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')
    report = replay(copied, from_step=6)
    assert report.is_same, report
    assert (report.to_step, report.num_losses, report.num_arrays) == (9, 3, None)
    assert str(report).endswith("; step 9 has no snapshot to compare")


@pytest.mark.parametrize(
    ("damage", "values", "message"),
    [
        (None, {"from_step": 3}, r"must be 0 or have a snapshot, and be before .* got 3: choose 0 or 2 or 4 or 6 or"),
        (None, {"from_step": 8, "to_step": 8}, r"before the last step to replay, 8, got 8: choose 0 or 2 or 4 or 6$"),
        (None, {"to_step": 10}, r"\(--to\) must be a step in .*loss.jsonl, 1 … 9, got 10"),
        ("line", {}, r"loss.jsonl must have step 5 in line 5, but has step 6: restore that file"),
        ("text", {}, r"loss.jsonl must have step, loss, lr in line 5, but has b'five': restore"),
        ("log", {}, r"a run must have completed a step to be replayed, but .*loss.jsonl contains no step"),
        ("config", {}, r"a run folder must contain config.json"),
        (
            None,
            {"model": None},
            r"with a model \(\w+\) of your own, which must be given again: model=…$",
        ),
        (None, {"batches": None}, r"with batches of your own, which must be given again: batches=…$"),
        (None, {"evaluation": None}, r"with evaluation images of your own"),
    ],
)
def test_an_impossible_replay_is_refused(copied, damage, values, message):
    log = copied / "loss.jsonl"
    text = log.read_text().splitlines(keepends=True)
    if damage == "line":
        log.write_text("".join(text[:4] + text[5:]))
    elif damage == "text":
        log.write_text("".join([*text[:4], "five\n", *text[5:]]))
    elif damage == "log":
        log.unlink()
    elif damage == "config":
        (copied / "config.json").unlink()
    with pytest.raises(ValueError, match=message):
        replay(copied, **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": object()}, r"a model must have the functions init and apply, got object"),
        ({"batches": 3}, r"batches must be a function from the step to \(pixels, labels\), .* got int"),
        ({"data": "shards"}, r"the setting data must not be given with batches of your own, got 'shards'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_opened(recorded, monkeypatch, values, message):
    monkeypatch.setattr("loopfeed.engine.replay.replay.Run", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ValueError, match=message):
        replay(recorded, **values)


def test_a_change_of_settings_in_mid_stretch_is_made_at_its_step(tmp_path):
    path = tmp_path / "run"

    class Stopping(Unhurried):
        def __call__(self, pull):
            if pull == 10:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.3)
            return super().__call__(pull)

    first = run(path, batches=Stopping(path))
    assert 0 < first.steps_done < 6
    values = {"learning_rate": 0.02, "label_smoothing": 0.0, "eval_every_steps": 2, "steps": 7}
    run(path, batches=toy_batch, resume=True, **values)
    rates = [record["lr"] for record in lines(path / "loss.jsonl")]
    assert max(rates[first.steps_done :]) <= 0.02 < rates[first.steps_done - 1]
    for begin in (0, 2):
        report = replay(path, from_step=begin)
        assert report.is_same, report
        assert (report.num_losses, report.num_arrays is not None) == (7 - begin, True)


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


def test_the_state_in_an_evaluation_that_was_cut_short_is_that_of_the_replay(tmp_path):
    path = tmp_path / "run"
    result = run(path, evaluation=StoppingEvaluation())
    end = result.steps_done
    assert end < STEPS
    report = replay(path, from_step=0)
    assert report.is_same, report
    assert (report.to_step, report.num_arrays is not None) == (end, True)
    # With snapshots, the one after the evaluation would still wait for its lines when that of step 8 comes, which is
    # then left out; `Unhurried` would wait for it in vain.
    run(path, resume=True, batches=toy_batch, snapshot_every_steps=0)
    first, second = replay(path, from_step=0, to_step=end), replay(path, from_step=end)
    assert first.is_same, first
    assert second.is_same, second
    assert first.num_evaluations + second.num_evaluations == len(lines(path / "eval.jsonl")) == 3


class Undefined(Linear):
    """A classifier whose logits are NaN if the first image is red."""

    def apply(self, params, batch_stats, images, train):
        logits, batch_stats = super().apply(params, batch_stats, images, train)
        return jnp.where(images[0, :, :, 0].mean() > 0, jnp.nan, logits), batch_stats


def test_nan_losses_are_equal(tmp_path):
    path = tmp_path / "run"
    config = toy_config(steps=STEPS, run_dir=path, stop_on_nan=False)
    train(config, model=Undefined(), batches=toy_batch)
    losses = [record["loss"] for record in lines(path / "loss.jsonl")]
    assert None in losses
    assert set(losses) != {None}
    report = replay(path, from_step=0, model=Undefined(), evaluation=None)
    assert report.is_same, report


def test_a_signal_ends_a_replay_with_what_was_compared(recorded):
    def stopping(pull):
        if pull == 8:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return toy_batch(pull)

    report = replay(recorded, from_step=0, batches=stopping)
    assert report.is_same, report
    assert report.stopped_by == "SIGINT"
    assert 0 < report.to_step < 6
    assert str(report).endswith(f"up to step {report.to_step}, where SIGINT stopped the replay")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Return a run of a small network on packed images, whose epochs are not a multiple of the batch."""
    folder = tmp_path_factory.mktemp("packed")
    pack(fake_source(22, size=8), folder / "data")
    pack(fake_source(7, size=8, seed=1, name="val"), folder / "data")
    config = toy_config(
        steps=9, batch=4, num_classes=None, model="resnet8", image_size=6, data=str(folder / "data"),
        run_dir=folder / "run",
        **{name: SETTINGS[name] for name in ("crop", "flip", "eval_every_steps")},
        snapshot_every_steps=4,
    )  # fmt: skip
    with small_resnets():
        train(config)
    return folder


def test_packed_data_may_have_moved_and_must_be_the_same(packed, tmp_path):
    shutil.copytree(packed / "run", tmp_path / "run")
    shutil.copytree(packed / "data", tmp_path / "moved")
    with small_resnets():
        report = replay_run(tmp_path / "run", from_step=0, data=str(tmp_path / "moved"))
    assert report.is_same, report
    assert (report.num_losses, report.num_evaluations) == (9, 3)
    pack(fake_source(22, size=8, seed=5), tmp_path / "other")
    pack(fake_source(7, size=8, seed=1, name="val"), tmp_path / "other")
    with pytest.raises(ValueError, match="digest"):
        replay_run(tmp_path / "run", data=str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"was trained without your own model: leave out the model argument"):
        replay_run(tmp_path / "run", model=Linear())
