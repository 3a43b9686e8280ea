"""The learning rate across a resume: a stretched schedule is announced, and an appended cycle begins where it was."""

import json
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loopfeed import Stage, TrainConfig, replay_run, run_settings, train
from loopfeed.engine.feed.shard_batches import ShardBatches
from loopfeed.engine.records.recorded_run import read_recorded
from loopfeed.engine.records.snapshot import read_snapshot, remove_snapshot, snapshot_steps
from loopfeed.engine.run.cycles import append_cycle, describe_rate_change, rate_text
from tests.fake_source import fake_source, pack
from tests.toy import Linear, toy_batch, toy_config

PEAK, NUM_IMAGES, BATCH = 0.01, 20, 4  # five steps an epoch


def of_steps(steps, **values):
    return TrainConfig(**({"steps": steps, "learning_rate": PEAK, "warmup_steps": 5} | values))


@pytest.mark.parametrize(
    ("schedule", "before", "now"),
    [
        ("cosine", "0.00004", "0.0057"),
        ("linear", "0.0004", "0.0055"),
        ("one-cycle", "0.00007", "0.0081"),
        ("step", "0.00001", "0.001"),
        ("polynomial", "0.00002", "0.003"),
        ("exponential", "0.00012", "0.0012"),
        ("cosine-restarts", "0.00067", "0.0011"),
    ],
)
def test_a_stretched_schedule_is_announced_with_the_rate_before_and_after(schedule, before, now):
    config, recorded = of_steps(60, schedule=schedule), of_steps(30, schedule=schedule)
    said = describe_rate_change(config, recorded, 30)
    assert said == (
        f"the learning rate goes on at {now}; it was {before} at step 30, because the schedule now has 60 steps "
        "(--append-epochs appends a cycle instead)"
    )
    assert describe_rate_change(recorded, recorded, 30) is None
    assert describe_rate_change(config, recorded, 0) is None
    config, recorded = (
        replace(each, stages=[Stage(until=2, learning_rate=0.1), Stage()]) for each in (config, recorded)
    )
    assert str(describe_rate_change(config, recorded, 30)).endswith("because the schedule now has 60 steps")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"steps": 60}, "goes on at 0.0077; it was 0.0054 at step 17, because the schedule now has 60 steps"),
        ({"learning_rate": 0.1}, "goes on at 0.05; it was 0.0054 at step 17, because the peak is now 0.1"),
        ({"final_fraction": 0.5}, "goes on at 0.0075; it was 0.0054 at step 17, because final_fraction is now 0.5"),
        ({"schedule": "constant", "steps": 60}, None),
        ({"momentum": 0.5}, None),
    ],
)
def test_the_reason_for_another_rate_is_named(changes, why):
    recorded = of_steps(30, schedule=changes.get("schedule", "linear"), warmup_steps=4)
    said = describe_rate_change(replace(recorded, **changes), recorded, 17)
    assert said == (why and f"the learning rate {why}")


def cosine(start, end, done):
    return end + (start - end) * math.cos(math.pi * done / 2) ** 2


def expected_rates(schedule, first_rate, peak, warmup, length):
    """Return the rates of a cycle of `length` steps in float64, from their description; `first_rate` is that before."""

    def after(step):
        since, left = step - warmup, length - warmup
        if schedule == "one-cycle":
            rise = left // 4
            if since < rise:
                return cosine(peak / 25 if warmup or not first_rate else first_rate, peak, since / rise)
            return cosine(peak, peak / 1e5, (since - rise) / (left - rise))
        return {
            "constant": peak,
            "step": peak * 0.1 ** sum(step >= round(part * length) for part in (1 / 3, 2 / 3, 8 / 9)),
            "cosine": cosine(peak, 0.0, since / left),
            "linear": peak * (1 - since / left),
        }[schedule]

    top = peak / 25 if schedule == "one-cycle" else peak
    rise = [first_rate + (top - first_rate) * step / warmup for step in range(warmup)]
    return rise + [after(step) for step in range(warmup, length)]


def rates_of(run):
    return [json.loads(line)["lr"] for line in (run / "loss.jsonl").read_text().splitlines()]


@pytest.fixture
def packed(tmp_path):
    pack(fake_source(NUM_IMAGES), tmp_path / "data")
    return str(tmp_path / "data")


def settings_of(packed, folder, **values):
    return TrainConfig(
        **{"data": packed, "batch": BATCH, "learning_rate": PEAK, "eval_split": "off", "prefetch": 2, "epochs": 4}
        | {"run_dir": str(folder), "snapshot_every_steps": 5, "keep_snapshots": 0, "momentum": 0.9}
        | values
    )


@pytest.fixture
def unhurried(tmp_path, monkeypatch):
    """Give the program a batch only when the snapshots before it are on the disk."""
    images_of = ShardBatches._images_of

    def patient(self, batch_index):
        due, until = batch_index // 5 * 5, time.monotonic() + 60
        while due and due not in snapshot_steps(tmp_path / "run/snapshots") and time.monotonic() < until:
            time.sleep(0.005)
        return images_of(self, batch_index)

    monkeypatch.setattr(ShardBatches, "_images_of", patient)


@pytest.mark.parametrize(
    ("schedule", "warmup", "cycle_warmup"),
    [("cosine", 4, 2), ("one-cycle", 0, 0)],
)
def test_cycles_are_appended_from_the_last_rate_up_to_a_peak(schedule, warmup, cycle_warmup, packed, tmp_path):
    run = tmp_path / "run"
    train(settings_of(packed, run, schedule=schedule, warmup_steps=warmup), model=Linear())
    rates = expected_rates(schedule, 0.0, PEAK, warmup, 20)
    peaks = [PEAK / 10, 0.05]
    for peak, given in zip(peaks, (None, 0.05), strict=True):
        config = replace(run_settings(run), resume=True, append_epochs=2, learning_rate=given)
        said: list[str] = []
        train(config, model=Linear(), notify=said.append)
        rates += expected_rates(schedule, rates[-1], peak, cycle_warmup, 10)
        assert any(
            line.endswith(f"to {rate_text(peak)}") and "a cycle of 10 steps is appended" in line for line in said
        )
    # float32, and sums of a rise whose parts are larger
    np.testing.assert_allclose(rates_of(run), rates, rtol=3e-6, atol=1e-9)
    recorded = read_recorded(run).config
    assert (recorded.steps, recorded.epochs, recorded.append_epochs, recorded.cycle_start_steps) == (40, 8, None, 30)


def test_a_run_stopped_within_an_appended_cycle_resumes_and_replays_to_the_bit(packed, unhurried, tmp_path):
    run = tmp_path / "run"
    values = {"schedule": "one-cycle", "cycle_momentum": True, "optimizer": "nesterov"}
    train(settings_of(packed, run, **values), model=Linear())
    appended = replace(run_settings(run), resume=True, append_epochs=2, learning_rate=None)
    train(appended, model=Linear())
    whole, rates = read_snapshot(run / "snapshots", 30).leaves, rates_of(run)
    # The same request again, as from a script that is run again, and a plain resume: the cycle goes on.
    again: tuple[dict[str, Any], ...] = ({"append_epochs": 2, "learning_rate": None}, {})
    for changes in again:
        config = replace(run_settings(run), resume=True, **changes)
        remove_snapshot(run / "snapshots", 30)
        said: list[str] = []
        train(config, model=Linear(), notify=said.append)
        assert not any("goes on at" in line for line in said)
        assert snapshot_steps(run / "snapshots") == [5, 10, 15, 20, 25, 30]
        assert rates_of(run) == rates
        for name, leaf in read_snapshot(run / "snapshots", 30).leaves.items():
            np.testing.assert_array_equal(leaf, whole[name], err_msg=name)
    train(replace(run_settings(run), resume=True, append_epochs=0.5, learning_rate=None), model=Linear())
    assert len(rates_of(run)) == 33
    for begin in (0, 25):  # before the cycle and within it
        report = replay_run(run, from_step=begin, model=Linear())
        assert report.is_same, report


def test_a_cycle_compiles_nothing(packed, tmp_path):
    values = {"schedule": "cosine", "compilation_cache": str(tmp_path / "cache")}
    train(settings_of(packed, tmp_path / "run", **values), model=Linear())
    cached = replace(run_settings(tmp_path / "run"), compilation_cache=values["compilation_cache"])
    assert train(replace(cached, resume=True, append_epochs=1, learning_rate=None), model=Linear()).from_cache


def test_a_run_with_a_cycle_is_not_resumed_from_before_it(packed, unhurried, tmp_path):
    train(settings_of(packed, tmp_path / "run", schedule="cosine"), model=Linear())
    train(replace(run_settings(tmp_path / "run"), resume=True, append_epochs=1), model=Linear())
    for step in (20, 25):
        remove_snapshot(tmp_path / "run/snapshots", step)
    with pytest.raises(ValueError, match=r"must be resumed from step 20, .* is of step 15: restore a later one"):
        train(replace(run_settings(tmp_path / "run"), resume=True), model=Linear())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 50}, "^append_epochs and epochs must not both be given, got 2 and 4: leave one out"),
        ({"epochs": 9.0}, "^append_epochs and epochs must not both be given, got 2 and 9: leave one out"),
        ({"epochs": None, "steps": 30}, "^append_epochs and steps must not both be given, got 2 and 30: leave one out"),
        ({"append_epochs": 0}, "^append_epochs must be more than 0, got 0"),
    ],
)
def test_a_cycle_is_refused_beside_another_length(changes, message):
    recorded = of_steps(20, epochs=4.0, batch=BATCH)
    config = replace(recorded, **{"append_epochs": 2} | changes)
    with pytest.raises(ValueError, match=message):
        append_cycle(config, recorded, 20, NUM_IMAGES, "data", lambda _: None)


def test_a_cycle_is_refused_without_a_complete_run_of_epochs(packed, unhurried, tmp_path):
    run = tmp_path / "run"
    asked: dict[str, Any] = {"resume": True, "append_epochs": 2}
    with pytest.raises(ValueError, match="append_epochs appends to a complete run, got 2 for a new one: give resume"):
        train(settings_of(packed, run, append_epochs=2), model=Linear())
    train(settings_of(packed, run, schedule="cosine"), model=Linear())
    remove_snapshot(run / "snapshots", 20)
    with pytest.raises(ValueError, match="append_epochs needs a complete run, got 2 for one with 15 of 20 steps done"):
        train(replace(run_settings(run), **asked), model=Linear())
    train(toy_config(run_dir=str(tmp_path / "toy")), model=Linear(), batches=toy_batch)
    with pytest.raises(ValueError, match=r"append_epochs must not be given with .*, which are endless, got 2"):
        train(replace(run_settings(tmp_path / "toy"), **asked), model=Linear(), batches=toy_batch)
    with pytest.raises(ValueError, match="append_epochs has no effect with a schedule of your own, got 2"):
        train(
            replace(run_settings(run), **asked, learning_rate=None, schedule="constant"), model=Linear(), schedule=abs
        )


def test_epochs_add_up_as_decimal_numbers():
    recorded = of_steps(100, epochs=0.1, batch=1)
    config = append_cycle(replace(recorded, append_epochs=0.2), recorded, 100, 1000, "data", lambda _: None)
    assert (config.epochs, config.steps) == (0.3, 300)


def test_the_requested_factor_is_in_the_rates():
    said = describe_rate_change(of_steps(60, schedule="cosine"), of_steps(30, schedule="cosine"), 30, factor=10.0)
    assert said
    assert said.startswith("the learning rate goes on at 0.057; it was 0.00039 at step 30, ")
