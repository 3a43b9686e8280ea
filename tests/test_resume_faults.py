"""What a resumed run lacks or finds wrong in its folder: it neither hangs, nor throws the run away, nor gets stuck."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from engine import train
from engine.feeder import Feeder
from engine.records.control_requests import ControlRequest, send_request
from engine.records.run_folder import RunFolder
from engine.records.snapshot import snapshot_steps
from engine.resume import StartingPoint, cut_logs
from tests.test_resume import EVALUATED, STEPS, StoppingEvaluation, run
from tests.toy import Linear, toy_batch, toy_config

SOON_S = 60.0


def small_run(path, *, batches=toy_batch, evaluation=None, notify=lambda _: None, **values):
    config = toy_config(run_dir=path, **values)
    return train(config, model=Linear(), batches=batches, evaluation=evaluation, notify=notify)


def make_unreadable(path, step):
    for file in (path / "snapshots" / str(step) / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")


def test_an_evaluation_that_is_due_holds_up_no_run_that_goes_on_without_any(tmp_path):
    path = tmp_path / "run"
    run(path, evaluation=StoppingEvaluation(), prefetch=1)
    results = []
    thread = threading.Thread(target=lambda: results.append(run(path, evaluation=None, resume=True)), daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert [(result.steps_done, result.stopped_by) for result in results] == [(STEPS, "steps")]


def test_an_evaluation_that_was_not_written_leaves_no_snapshot_that_counts_it(tmp_path):
    path = tmp_path / "run"

    def filling_the_disk(step):
        if step == 2:
            (path / "eval.jsonl").symlink_to("/dev/full")
        return toy_batch(step)

    with pytest.raises(OSError, match="No space left"):
        small_run(path, steps=4, batches=filling_the_disk, evaluation=EVALUATED)
    (path / "eval.jsonl").unlink()
    result = small_run(path, steps=4, evaluation=EVALUATED, resume=True)
    assert (result.steps_done, [record.step for record in result.evaluations]) == (4, [4])


def test_where_no_snapshot_can_be_read_nothing_is_thrown_away(tmp_path):
    path = tmp_path / "run"
    small_run(path, steps=4)
    (step,) = snapshot_steps(path / "snapshots")
    make_unreadable(path, step)
    before = {name: (path / name).read_bytes() for name in ("loss.jsonl", "result.json", "config.json")}
    with pytest.raises(ValueError, match=r"one must be readable, and none is .* remove that folder to begin"):
        small_run(path, steps=4, resume=True)
    assert {name: (path / name).read_bytes() for name in before} == before
    shutil.rmtree(path / "snapshots")
    assert len(small_run(path, steps=4, resume=True).losses) == 4


def test_a_snapshot_that_could_not_be_read_is_not_found_again_without_its_lines(tmp_path):
    path = tmp_path / "run"
    small_run(path, steps=4)
    small_run(path, steps=8, resume=True)
    assert snapshot_steps(path / "snapshots") == [4, 8]
    (path / "snapshots" / "8" / "facts").rename(tmp_path / "facts")
    told: list[str] = []

    def cut_off(step):
        if step == 6:
            raise ConnectionResetError("cut off")
        return toy_batch(step)

    with pytest.raises(ConnectionResetError):
        small_run(path, steps=8, batches=cut_off, resume=True, notify=told.append)
    assert told[0].startswith("warning: ")
    assert snapshot_steps(path / "snapshots") == [4, 6]
    assert small_run(path, steps=8, resume=True).steps_done == 8


def test_lines_are_counted_without_holding_them_and_a_torn_one_does_not_count(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    lines = [json.dumps({"step": step}) + "\n" for step in range(1, 1001)]
    (tmp_path / "loss.jsonl").write_text("".join(lines) + '{"step": 10')
    with RunFolder(tmp_path, resume=True) as folder:
        with pytest.raises(ValueError, match=r"must have the 1001 lines .* has 1000"):
            cut_logs(folder, StartingPoint(step=1001))
        cut_logs(folder, StartingPoint(step=700))
    assert (tmp_path / "loss.jsonl").read_text() == "".join(lines[:700])


def test_requests_are_on_the_disk_before_the_last_snapshot(tmp_path, monkeypatch):
    path = tmp_path / "run"
    synced: list[str] = []
    real = os.fsync

    def noted(handle):
        synced.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        real(handle)

    def asking(step):
        if step == 1:
            send_request(path, ControlRequest(learning_rate_factor=0.5))
        if step and not (path / "control.jsonl").exists():
            time.sleep(0.05)
        return toy_batch(step)

    monkeypatch.setattr(os, "fsync", noted)
    small_run(path, steps=40, batches=asking, prefetch=1)
    logs = [number for number, name in enumerate(synced) if name.endswith("control.jsonl")]
    snapshots = [number for number, name in enumerate(synced) if "/snapshots/" in name]
    assert logs
    assert logs[0] < snapshots[0]


def test_a_signal_that_ends_the_wait_for_the_readers_leaves_no_sink_open(tmp_path, monkeypatch):
    def interrupted(_feeder):
        raise KeyboardInterrupt

    monkeypatch.setattr(Feeder, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "run", steps=2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loss-stream")]
