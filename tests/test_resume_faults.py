"""What a resumed run lacks or finds wrong in its folder: it neither hangs, nor throws the run away, nor gets stuck."""

import errno
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from loopfeed import train
from loopfeed.engine.control.request import ControlRequest
from loopfeed.engine.feed.feeder import Feeder
from loopfeed.engine.records import snapshot
from loopfeed.engine.records.control_log import read_events
from loopfeed.engine.records.control_requests import send_request
from loopfeed.engine.records.json_lines import JsonLines
from loopfeed.engine.records.run_folder import RunFolder, recorded_versions
from loopfeed.engine.records.snapshot import snapshot_steps
from loopfeed.engine.run.resume import Resume, find_cuts, rewind_run
from tests.fake_source import files_of
from tests.test_resume import EVALUATED, StoppingEvaluation, run
from tests.toy import Linear, toy_batch, toy_config

SOON_S = 60.0


def small_run(path, *, batches=toy_batch, evaluation=None, notify=lambda _: None, **values):
    config = toy_config(run_dir=path, **values)
    return train(config, model=Linear(), batches=batches, evaluation=evaluation, notify=notify)


def make_unreadable(path, step):
    for file in (path / "snapshots" / str(step) / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")


def test_a_run_with_evaluations_is_not_resumed_without_them(tmp_path):
    path = tmp_path / "run"
    run(path, evaluation=StoppingEvaluation(), prefetch=1)
    with pytest.raises(ValueError, match="must keep its num_eval_batches, which was 3, got 0"):
        run(path, evaluation=None, resume=True)
    # An evaluation was due when it stopped; it is made after all.
    assert run(path, resume=True).evaluations[0].step == 6


def test_an_evaluation_that_was_not_written_leaves_no_snapshot_that_counts_it(tmp_path):
    path = tmp_path / "run"

    def blocking_the_log(step):
        if step == 2:
            (path / "eval.jsonl").symlink_to("/dev/full")
        return toy_batch(step)

    with pytest.raises(OSError, match="it is a link, through which nothing is written"):
        small_run(path, steps=4, batches=blocking_the_log, evaluation=EVALUATED)
    (path / "eval.jsonl").unlink()
    result = small_run(path, steps=4, evaluation=EVALUATED, resume=True)
    assert (result.steps_done, [record.step for record in result.evaluations]) == (4, [4])


def test_if_no_snapshot_is_readable_nothing_is_removed(tmp_path):
    path = tmp_path / "run"
    small_run(path, steps=4)
    (step,) = snapshot_steps(path / "snapshots")
    make_unreadable(path, step)
    before = {name: (path / name).read_bytes() for name in ("loss.jsonl", "result.json", "config.json")}
    with pytest.raises(ValueError, match=r"no snapshot in .* is readable .* remove that folder to start"):
        small_run(path, steps=4, resume=True)
    assert {name: (path / name).read_bytes() for name in before} == before
    shutil.rmtree(path / "snapshots")
    assert len(small_run(path, steps=4, resume=True).losses) == 4


@pytest.mark.parametrize("failing", ["stat", "scandir", "restore"])
def test_a_snapshot_that_the_disk_fails_to_read_is_kept(tmp_path, monkeypatch, failing):
    """Resuming from the one before it would remove it, and the lines of its steps."""
    path = tmp_path / "run"
    small_run(path, steps=2)
    small_run(path, steps=4, resume=True)
    before = files_of(path)
    real = getattr(os, failing, open)

    def fail(found=".", *args, **more):
        if isinstance(found, str | Path) and f"{path}/snapshots/4/state" in str(found):
            raise OSError(errno.ESTALE, "Stale file handle", str(found))
        return real(found, *args, **more)

    def restore(found):
        raise ValueError("ABORTED: Error reading: Stale file handle [os_error_code='116'] [source locations='x']")

    with monkeypatch.context() as patch:
        patch.setattr(*((snapshot, "restore_arrays", restore) if failing == "restore" else (os, failing, fail)))
        with pytest.raises(ValueError, match=r"snapshots/4 cannot be read: .*Stale file handle.*try again"):
            small_run(path, steps=6, resume=True)
    assert files_of(path) == before
    assert small_run(path, steps=6, resume=True).steps_done == 6


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
        with pytest.raises(ValueError, match=r"must have the 1,001 lines .* has 1,000"):
            find_cuts(tmp_path, Resume(step=1001))
        start = Resume(step=700)
        rewind_run(folder, start, find_cuts(tmp_path, start))
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


def test_a_request_that_comes_while_the_run_opens_its_data_takes_effect(tmp_path):
    path = tmp_path / "run"

    class AskingModel(Linear):
        def init(self, key):
            # Traced after the folder is locked and before anything is compiled.
            if not (path / "control").exists():
                send_request(path, ControlRequest(learning_rate_factor=0.5))
            return super().init(key)

    train(toy_config(steps=3, run_dir=path), model=AskingModel(), batches=toy_batch)
    (event,) = read_events(path / "control.jsonl")
    assert event.learning_rate_factor == 0.5


def test_a_resume_that_fails_in_tracing_removes_nothing_from_the_run(tmp_path):
    path = tmp_path / "run"
    small_run(path, steps=4)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != ".lock"}

    class Broken(Linear):
        def apply(self, params, batch_stats, images, train):
            raise ZeroDivisionError

    config = toy_config(run_dir=path, resume=True, steps=6)
    with pytest.raises(ZeroDivisionError):
        train(config, model=Broken(), batches=toy_batch)
    with pytest.raises(ZeroDivisionError):
        train(replace(config, resume=False, overwrite=True), model=Broken(), batches=toy_batch)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != ".lock"} == before


def test_versions_of_all_launches_of_a_run_are_recorded(tmp_path, monkeypatch):
    path = tmp_path / "run"
    with monkeypatch.context() as earlier:
        versions = recorded_versions() | {"jax": "0.1.2"}
        earlier.setattr("loopfeed.engine.records.run_folder.recorded_versions", lambda: versions)
        small_run(path, steps=2)
    for steps in (3, 4):
        told: list[str] = []
        small_run(path, steps=steps, resume=True, notify=told.append)
        assert any(
            line.startswith("warning: only the same versions guarantee bit-identical results")
            and "jax 0.1.2, now" in line
            for line in told
        )


def test_one_snapshot_at_a_time_waits_for_the_lines_of_a_slow_disk(tmp_path, monkeypatch):
    gate = threading.Event()
    told: list[str] = []
    append = JsonLines.append

    def held(self, text):
        assert gate.wait(SOON_S)
        append(self, text)

    monkeypatch.setattr(JsonLines, "append", held)
    monkeypatch.setattr("loopfeed.engine.records.snapshot_writer._SAY_SKIPPED_EVERY_S", 0.0)

    def batches(step):
        if step == 7:
            gate.set()
        return toy_batch(step)

    small_run(tmp_path, steps=8, batches=batches, prefetch=1, snapshot_every_steps=1, notify=told.append)
    left_out = [line for line in told if "too slow for the logs of the run" in line]
    assert len(left_out) >= 4
    assert snapshot_steps(tmp_path / "snapshots")[-1] == 8
