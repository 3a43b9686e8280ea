"""Requests on a disk that hangs: the program goes on without them, stops on request, and repeats what took effect."""

import json
import os
import threading
import time

import pytest

from loopfeed import Callback, replay_run, train
from loopfeed.engine.control import board as boards
from loopfeed.engine.control.board import SNAPSHOT, ControlBoard
from loopfeed.engine.control.recording import EventRecorder
from loopfeed.engine.control.request import ControlRequest
from loopfeed.engine.records import control_log
from loopfeed.engine.records.control_log import ControlLog, read_events
from tests.toy import Linear, toy_batch, toy_config

pytestmark = pytest.mark.timeout(120)


class Disk:
    """A disk that hangs at the lines of a control log between `hang` and `answer`."""

    def __init__(self, monkeypatch):
        self._answers, self.hung = threading.Event(), threading.Event()
        self._answers.set()
        write = os.write

        def hanging(file, content):
            if b'"learning_rate_factor"' in bytes(content) and not self._answers.is_set():
                self.hung.set()
                assert self._answers.wait(100)
            return write(file, content)

        monkeypatch.setattr(os, "write", hanging)

    def hang(self):
        self._answers.clear()

    def answer(self):
        self._answers.set()


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(boards, "_LEAST_PATIENCE_S", 0.05)
    monkeypatch.setattr(boards, "_END_TIMEOUT_S", 0.2)
    monkeypatch.setattr(control_log, "_TIMEOUT_S", 0.2)
    disk = Disk(monkeypatch)
    yield disk
    disk.answer()


@pytest.fixture
def opened(disk, tmp_path):
    """Yield a board whose events a thread records in a log, and the log's path."""
    path = tmp_path / "control.jsonl"
    log, board = ControlLog(path), ControlBoard()
    recorder = EventRecorder(log.append)
    recorder.start()
    board.prepare(first_batch=0, batches_per_step=1, replayed=(), record=recorder.begin)
    yield board, path
    disk.answer()
    recorder.close()
    log.close()


def wait_for(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_event_is_recorded_before_its_pull_is_answered(opened):
    board, path = opened
    board.request(ControlRequest("a", snapshot=True))
    assert board.words(4, 2) == (SNAPSHOT, 0x3F800000, 1)
    assert [(each.request, each.pull) for each in read_events(path)] == [("a", 4)]


def test_an_event_that_is_late_takes_effect_at_the_pull_at_which_it_is_recorded(opened, disk):
    board, path = opened
    disk.hang()
    board.request(ControlRequest("a", learning_rate_factor=0.5))
    board.request(ControlRequest("b", snapshot=True))
    for pull in range(3):
        assert board.words(pull, 1) == (0, 0x3F800000, 1)
    disk.answer()
    late = board._late
    assert late is not None
    wait_for(late.is_over)
    assert read_events(path) == ()  # the line of pull 0 is gone
    assert board.words(3, 1) == (SNAPSHOT, 0x3F000000, 1)
    assert [(each.request, each.pull) for each in read_events(path)] == [("a", 3), ("b", 3)]


def test_a_stop_needs_no_record(opened, disk):
    board, _ = opened
    disk.hang()
    board.request(ControlRequest("a", snapshot=True))
    board.words(0, 1)
    board.request(ControlRequest("b", stop=True))
    assert board.words(1, 1)[2] == 0
    assert board.stop_reason == "control-run"


def test_a_request_of_a_callback_that_cannot_be_recorded_at_the_end_is_an_error(opened, disk):
    board, _ = opened
    disk.hang()
    board.request(ControlRequest("callback-step-1-1", snapshot=True))
    with pytest.raises(TimeoutError, match=r"must be recorded in control.jsonl within 0.2 s"):
        board.record_late(1)


def test_an_error_of_a_late_record_is_raised_at_the_next_pull(disk):
    def record(event, confirm):
        del event, confirm
        disk.hung.wait(60)
        raise OSError("the disk is gone")

    board, recorder = ControlBoard(), EventRecorder(record)
    recorder.start()
    board.prepare(first_batch=0, batches_per_step=1, replayed=(), record=recorder.begin)
    board.request(ControlRequest("a", snapshot=True))
    assert board.words(0, 1)[0] == 0
    late = board._late
    assert late is not None
    disk.hung.set()
    wait_for(late._over.is_set)
    with pytest.raises(OSError, match="the disk is gone"):
        board.words(1, 1)
    recorder.close()


class Asking(Callback):
    """Requests another rate and a snapshot after a step, when the disk hangs, and lets it answer after another one."""

    def __init__(self, disk, *, answer_at):
        self._disk, self._answer_at = disk, answer_at
        self.steps = []

    def on_fit_begin(self, run):
        self._run = run

    def on_step(self, record):
        self.steps.append(record.step)
        if record.step == 3:
            self._disk.hang()
            self._run.request(learning_rate_factor=0.25, snapshot=True)
        if record.step == self._answer_at:
            self._disk.answer()


def paced(step):
    """Batches that leave the sinks time to follow."""
    time.sleep(0.01)
    return toy_batch(step)


def test_a_run_goes_on_while_the_disk_hangs_and_is_replayed_with_what_took_effect(disk, tmp_path):
    asking = Asking(disk, answer_at=20)
    config = toy_config(steps=60, snapshot_every_steps=0, run_dir=tmp_path)
    result = train(config, model=Linear(), batches=paced, callbacks=[asking])
    assert asking.steps == list(range(1, 61))
    (event,) = read_events(tmp_path / "control.jsonl")
    assert event.pull >= 20
    plain = train(toy_config(steps=60), model=Linear(), batches=paced).losses
    assert (result.losses[: event.pull + 1] == plain[: event.pull + 1]).all()
    assert (result.losses[event.pull + 2 :] != plain[event.pull + 2 :]).any()
    assert (tmp_path / f"snapshots/{event.step}").is_dir()
    assert replay_run(tmp_path, from_step=0, model=Linear(), batches=toy_batch).is_same


def test_a_disk_that_hangs_for_ever_does_not_hold_up_a_stop(disk, tmp_path):

    class Stopping(Asking):
        def on_step(self, record):
            super().on_step(record)
            if record.step == 10:
                self._run.request(stop=True)

    config = toy_config(steps=100_000, snapshot_every_steps=0, run_dir=tmp_path)
    asking = Stopping(disk, answer_at=None)
    with pytest.raises(TimeoutError, match="check the disk"):
        train(config, model=Linear(), batches=paced, callbacks=[asking])
    assert 10 <= asking.steps[-1] < 1000


def test_a_log_of_requests_that_another_program_wrote_to_costs_no_weights(tmp_path):
    class AskingLast(Callback):
        def on_fit_begin(self, run):
            self._run = run

        def on_step(self, record):
            if record.step == 5:
                self._run.request(learning_rate_factor=0.25)

    def batches(step):
        if step == 4:
            (tmp_path / "control.jsonl").write_text("mine\n")
        return toy_batch(step)

    with pytest.raises(ValueError, match="do not let another program write to it"):
        train(toy_config(steps=5, run_dir=tmp_path), model=Linear(), batches=batches, callbacks=[AskingLast()])
    end = json.loads((tmp_path / "result.json").read_text())
    assert (end["steps_done"], end["stopped_by"]) == (5, "error")
    assert (tmp_path / "model.safetensors").exists()
