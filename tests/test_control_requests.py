"""Requests to a running training: what may be asked, files that are whole or not there, and who gets them, once."""

import errno
import json
import math
import os
import threading
import time
from pathlib import Path

import pytest

from loopfeed.engine.control.request import ControlRequest, new_request_id
from loopfeed.engine.records.control_requests import (
    CONTROL_FOLDER_NAME,
    ControlMailbox,
    find_requests,
    remove_requests,
    send_request,
    withdraw,
)
from tests.waiting import wait_until

LIMIT_S = 60


@pytest.fixture
def open_mailbox(tmp_path):
    """Starts a mailbox of `tmp_path` that looks often; it is closed after the test."""
    opened = []

    def open_one(deliver) -> ControlMailbox:
        opened.append(ControlMailbox(tmp_path, deliver))
        opened[-1].start()
        return opened[-1]

    yield open_one
    for mailbox in opened:
        mailbox.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "control-mailbox"]


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr("loopfeed.engine.records.control_requests._POLL_EVERY_S", 0.002)


def files(run: Path) -> list[str]:
    folder = run / CONTROL_FOLDER_NAME
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_golden_file(tmp_path):
    send_request(tmp_path, ControlRequest("17-ab", learning_rate_factor=0.1, snapshot=True))
    assert files(tmp_path) == ["17-ab.json"]
    assert (tmp_path / "control/17-ab.json").read_bytes() == (
        b'{"id": "17-ab", "learning_rate_factor": 0.1, "snapshot": true, "evaluate": false, "stop": false}\n'
    )


@pytest.mark.parametrize("factor", [-1.0, -1e-300, math.nan, math.inf, -math.inf, 3.41e38, 1e-38, 10**400])
def test_a_factor_that_the_device_cannot_apply_is_refused(factor):
    with pytest.raises(ValueError, match=r"learning_rate_factor must be 0 or from 1\.2e-38 to 3\.4e38"):
        ControlRequest(learning_rate_factor=factor)


@pytest.mark.parametrize("name", ["snapshot", "evaluate", "stop"])
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_flags_are_true_or_false(name, value):
    with pytest.raises(ValueError, match=f"{name} must be true or false"):
        ControlRequest(**{"learning_rate_factor": 1.0, name: value})


@pytest.mark.parametrize("value", ["", ".", "..", "a/b", "/a", "a.b", "a" * 101, "a\n", "ü", 7, None])
def test_an_id_is_a_file_name_without_surprises(tmp_path, value):
    with pytest.raises(ValueError, match="a request's id must be 1 to 100 letters, digits"):
        ControlRequest(value, stop=True)
    with pytest.raises(ValueError, match="a request's id must be"):
        withdraw(tmp_path, value)


def test_a_request_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def fail(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        send_request(tmp_path, ControlRequest(stop=True))
    assert files(tmp_path) == []


def test_a_request_survives_a_run_that_begins_while_it_is_written(tmp_path, monkeypatch):
    """Such a run removes the requests that lie there from before, also one that has no name yet."""
    fsync, starts = os.fsync, iter([True])

    def start_a_run_once(handle):
        fsync(handle)
        if next(starts, False):
            remove_requests(tmp_path, find_requests(tmp_path))

    monkeypatch.setattr(os, "fsync", start_a_run_once)
    send_request(tmp_path, ControlRequest("a", stop=True))
    assert [path.name for path in (tmp_path / CONTROL_FOLDER_NAME).iterdir()] == ["a.json"]


def test_each_request_comes_once_in_order_of_time_and_its_file_goes_before(tmp_path, open_mailbox):
    delivered, left = [], []

    def deliver(request):
        left.append((tmp_path / CONTROL_FOLDER_NAME / f"{request.id}.json").exists())
        delivered.append(request)

    open_mailbox(deliver)
    requests = [ControlRequest(learning_rate_factor=number / 4) for number in range(20)]
    for request in requests:
        send_request(tmp_path, request)
    wait_until(lambda: len(delivered) == 20)
    assert sorted(delivered, key=lambda request: request.id) == requests
    assert left == [False] * 20
    assert files(tmp_path) == []


def test_requests_of_an_earlier_run_are_removed_and_not_delivered(tmp_path, open_mailbox):
    send_request(tmp_path, ControlRequest("old", stop=True))
    folder = tmp_path / CONTROL_FOLDER_NAME
    (folder / "broken.json").write_text("{")
    (folder / ".b.json.0a1b2c3d").write_text("what a sender left that was killed")
    (folder / "notes.txt").write_text("of somebody")
    (folder / "kept.json.bak").write_text("of somebody")
    delivered: list[ControlRequest] = []
    remove_requests(tmp_path, find_requests(tmp_path))
    assert files(tmp_path) == ["kept.json.bak", "notes.txt"]
    # What comes from then on waits for the mailbox: a run locks its folder long before it looks.
    send_request(tmp_path, ControlRequest("new", stop=True))
    open_mailbox(delivered.append)
    wait_until(lambda: delivered)
    assert [request.id for request in delivered] == ["new"]
    assert files(tmp_path) == ["kept.json.bak", "notes.txt"]


VALID = json.loads(ControlRequest("a", stop=True).to_json())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 4000,
        json.dumps(VALID | {"id": "other"}).encode(),
        json.dumps(VALID | {"more": 1}).encode(),
        json.dumps(VALID | {"stop": 1}).encode(),
        json.dumps(VALID | {"stop": False}).encode(),
        json.dumps(VALID | {"learning_rate_factor": math.nan}).encode(),
        json.dumps(VALID | {"learning_rate_factor": -1}).encode(),
        json.dumps(VALID).encode()[:-1] + b', "stop": true}',
        json.dumps(VALID).encode() + b" " * 5000,
    ],
    ids=lambda content: content[:12].decode("latin-1") + str(len(content)),
)
def test_an_invalid_request_is_removed_and_delays_nothing(tmp_path, open_mailbox, content):
    delivered: list[ControlRequest] = []
    open_mailbox(delivered.append)
    (tmp_path / CONTROL_FOLDER_NAME).mkdir()
    (tmp_path / CONTROL_FOLDER_NAME / "a.json").write_bytes(content)
    wait_until(lambda: not files(tmp_path))
    send_request(tmp_path, ControlRequest("b", stop=True))
    wait_until(lambda: delivered)
    assert [request.id for request in delivered] == ["b"]


def test_an_entry_that_is_not_a_file_delays_nothing(tmp_path, open_mailbox):
    delivered: list[ControlRequest] = []
    open_mailbox(delivered.append)
    folder = tmp_path / CONTROL_FOLDER_NAME
    folder.mkdir()
    (folder / "0.json").mkdir()
    (folder / "1.json").symlink_to("nowhere")
    os.mkfifo(folder / "2.json")
    send_request(tmp_path, ControlRequest("b", stop=True))
    wait_until(lambda: delivered)
    assert [request.id for request in delivered] == ["b"]
    wait_until(lambda: files(tmp_path) == ["0.json", "1.json"])


@pytest.mark.parametrize("error", [ValueError("no"), OSError(errno.EIO, "no"), AssertionError()])
def test_an_exception_of_deliver_does_not_stop_the_next_request(tmp_path, open_mailbox, error):
    delivered: list[str] = []

    def deliver(request):
        delivered.append(request.id)
        raise error

    open_mailbox(deliver)
    for name in "ab":
        send_request(tmp_path, ControlRequest(name, stop=True))
    wait_until(lambda: len(delivered) == 2)
    assert delivered == ["a", "b"]
    assert files(tmp_path) == []


def io_error(*_arguments, **_settings):
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(("module", "name"), [(Path, "iterdir"), (os, "open"), (Path, "unlink")])
def test_requests_arrive_again_after_a_disk_failure(tmp_path, monkeypatch, open_mailbox, module, name):
    delivered: list[ControlRequest] = []
    failures: list[int] = []

    def fail(*_arguments, **_settings):
        failures.append(1)
        io_error()

    request = ControlRequest(stop=True)
    (tmp_path / CONTROL_FOLDER_NAME).mkdir()
    (tmp_path / "prepared").write_text(request.to_json())
    open_mailbox(delivered.append)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, fail)
        if name == "iterdir":  # the look that was under way is over
            wait_until(lambda: failures)
        (tmp_path / "prepared").rename(tmp_path / CONTROL_FOLDER_NAME / f"{request.id}.json")
        wait_until(lambda: len(failures) > 3)
        assert delivered == []
    wait_until(lambda: delivered)
    assert delivered == [request]


def test_a_disk_failure_at_the_start_does_not_fail_the_run(tmp_path, monkeypatch, open_mailbox):
    delivered: list[ControlRequest] = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", io_error)
        open_mailbox(delivered.append)
    request = ControlRequest(stop=True)
    send_request(tmp_path, request)
    wait_until(lambda: delivered)
    assert delivered == [request]


def test_a_request_is_either_withdrawn_or_delivered(tmp_path, open_mailbox):
    delivered: list[str] = []
    open_mailbox(lambda request: delivered.append(request.id))
    withdrawn = []
    for number in range(300):
        request = ControlRequest(f"{number:03d}", stop=True)
        send_request(tmp_path, request)
        if number % 3:
            time.sleep(number % 7 / 2000)  # around the time at which the mailbox looks
        if withdraw(tmp_path, request.id):
            withdrawn.append(request.id)
    wait_until(lambda: len(delivered) + len(withdrawn) == 300)
    assert sorted(delivered + withdrawn) == [f"{number:03d}" for number in range(300)]


def test_a_request_that_is_withdrawn_while_it_is_read_is_not_delivered(tmp_path, monkeypatch, open_mailbox):
    fdopen = os.fdopen
    delivered: list[str] = []
    outcomes: list[bool] = []

    def withdrawn_meanwhile(handle, mode):
        if mode == "rb" and not outcomes:
            outcomes.append(withdraw(tmp_path, "a"))
        return fdopen(handle, mode)

    open_mailbox(lambda request: delivered.append(request.id))
    monkeypatch.setattr(os, "fdopen", withdrawn_meanwhile)
    send_request(tmp_path, ControlRequest("a", stop=True))
    wait_until(lambda: outcomes)
    send_request(tmp_path, ControlRequest("b", stop=True))
    wait_until(lambda: delivered)
    assert outcomes == [True]
    assert delivered == ["b"]


def test_closing_a_busy_mailbox_delivers_no_more_and_does_not_wait_for_the_disk(tmp_path, open_mailbox, monkeypatch):
    monkeypatch.setattr("loopfeed.engine.records.control_requests._CLOSE_TIMEOUT_S", 0.01)
    gate, is_closed_first = threading.Event(), []
    delivered: list[str] = []

    def deliver(request):
        delivered.append(request.id)
        is_closed_first.append(gate.wait(LIMIT_S))

    (tmp_path / "prepared").mkdir()
    for name in "ab":
        (tmp_path / "prepared" / f"{name}.json").write_text(ControlRequest(name, stop=True).to_json())
    mailbox = open_mailbox(deliver)
    (tmp_path / "prepared").rename(tmp_path / CONTROL_FOLDER_NAME)  # both are found at one look
    wait_until(lambda: delivered)
    mailbox.close()
    gate.set()
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "control-mailbox"])
    assert (delivered, is_closed_first, files(tmp_path)) == (["a"], [True], ["b.json"])


def test_a_request_is_withdrawn_once(tmp_path):
    send_request(tmp_path, ControlRequest("a", stop=True))
    send_request(tmp_path, ControlRequest("b", stop=True))
    assert withdraw(tmp_path, "a")
    assert not withdraw(tmp_path, "a")
    assert files(tmp_path) == ["b.json"]


def test_of_requests_that_are_found_together_the_earliest_comes_first(tmp_path, open_mailbox):
    delivered, gate, is_busy = [], threading.Event(), threading.Event()

    def deliver(request):
        is_busy.set()
        assert gate.wait(LIMIT_S)
        delivered.append(request.id)

    open_mailbox(deliver)
    send_request(tmp_path, ControlRequest("0", stop=True))
    assert is_busy.wait(LIMIT_S)
    for name in "3142":
        send_request(tmp_path, ControlRequest(name, stop=True))
    gate.set()
    wait_until(lambda: len(delivered) == 5)
    assert delivered == ["0", "1", "2", "3", "4"]


def test_ids_sort_by_time_and_differ(monkeypatch):
    times = [1, 9, 10, 1_763_712_000_000_000_000]
    ids = []
    for now in times:
        monkeypatch.setattr("loopfeed.engine.control.request.time.time_ns", lambda now=now: now)
        ids += [new_request_id(), new_request_id()]
    assert len(set(ids)) == 8
    assert [int(one.split("-")[0]) for one in sorted(ids)] == [now for now in times for _ in range(2)]


@pytest.mark.parametrize("factor", [0, 0.0, 1, 2.0**-126, (2 - 2.0**-23) * 2.0**127])
def test_the_range_of_a_factor_is_that_of_normal_float32(factor):
    assert ControlRequest(learning_rate_factor=factor).learning_rate_factor == factor
