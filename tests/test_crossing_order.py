"""The calls to the host come in the order of the program, whatever the metrics cost, so a kill loses no evaluation."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loopfeed import train
from loopfeed.engine.feed.feeder import _LEAST_DEPTH
from loopfeed.engine.records.snapshot import snapshot_steps
from loopfeed.engine.run.recorder import Recorder
from tests.crossing_order import CHUNK, EVALUATED, METRICS, expected_order, recorded_order
from tests.killed_run import wait_for
from tests.toy import Linear, toy_batch, toy_config

ROOT = Path(__file__).parents[1]
PULLS = {"pull", "evaluation pull"}


@pytest.mark.parametrize(("transport", "chunk"), [("inplace", 1), ("callback", 4), ("cuda", 4)])
def test_the_crossings_of_one_device_come_in_the_order_of_the_program(transport, chunk, tmp_path, cards):
    found, expected = recorded_order(tmp_path, transport=transport, chunk_batches=chunk), expected_order(chunk)
    if transport == "cuda":
        # Its pulls are answered when the work is enqueued, and what is pushed arrives later, in its own order.
        found, expected = ([each for each in order if each[0] not in PULLS] for order in (found, expected))
    assert found == expected


def in_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )


def test_the_crossings_of_the_first_of_two_devices_come_in_the_order_of_the_program(tmp_path):
    done = in_process("-m", "tests.crossing_order", "2", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected_order(CHUNK)


EVERY = _LEAST_DEPTH + 2
EVALUATED_AT = [EVERY * number for number in range(1, 5)]


def run(run_dir, **values):
    """Train, evaluating and taking a snapshot after the same steps; wait for each snapshot, so that none is skipped."""
    config = toy_config(
        steps=EVALUATED_AT[-1],
        eval_every_steps=EVERY,
        snapshot_every_steps=EVERY,
        keep_snapshots=1,
        keep_best="slow:max",
        run_dir=run_dir,
        **values,
    )

    def batches(pull):
        # The feeder reads so many batches ahead; by then the loop has pushed the snapshot, and not yet the next one.
        if (step := pull - _LEAST_DEPTH - 1) in EVALUATED_AT:
            wait_for(Path(run_dir) / f"snapshots/{step}")
        return toy_batch(pull)

    return train(config, model=Linear(), batches=batches, evaluation=EVALUATED, metrics=METRICS)


def assert_complete(run_dir):
    """Assert that each evaluation is recorded once, and that the kept snapshots are the newest and the best."""
    records = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]
    assert [each["step"] for each in records] == EVALUATED_AT
    best = max(records, key=lambda each: each["metrics"]["slow"])["step"]
    assert set(snapshot_steps(run_dir / "snapshots")) == {best, EVALUATED_AT[-1]}


def test_a_run_killed_at_any_snapshot_keeps_each_evaluation_once_and_the_best_snapshot(tmp_path, monkeypatch):
    def copy(_launch, step, _path):
        # What a kill at this instant would leave.
        shutil.copytree(tmp_path / "run", tmp_path / f"killed-{step}")

    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "_note_snapshot", copy)
        run(tmp_path / "run")
    killed = sorted(tmp_path.glob("killed-*"))
    assert len(killed) == len(EVALUATED_AT)
    for copied in killed:
        run(copied, resume=True)
        assert_complete(copied)
