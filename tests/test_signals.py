"""Signals: the first requests a clean stop, the second ends at once, and handlers are restored afterwards."""

import os
import signal
import threading
import time
import traceback

import pytest

from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.control.signals import StopSignals, call_on_worker
from loopfeed.engine.peers import BEAT_FILE, signals_file

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
SOON_S = 20.0


@pytest.fixture(autouse=True)
def _handlers():
    """Known handlers around every test, and proof that they are back after it."""

    def handler(number, frame):
        raise AssertionError("the handler of the test was called")

    before = {number: signal.signal(number, handler) for number in SIGNALS}
    yield
    try:
        assert all(signal.getsignal(number) is handler for number in SIGNALS)
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@pytest.fixture
def each_signal_counts(monkeypatch):
    monkeypatch.setattr("loopfeed.preprocess.stop_signals.BURST_S", 0.0)


def raise_signal(number):
    signal.raise_signal(number)


def wait_until(condition):
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def send_soon(number):
    """Sends a signal to the process from another thread, as the kernel does for Ctrl-C."""
    timer = threading.Timer(0.02, os.kill, (os.getpid(), number))
    timer.start()
    return timer


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.usefixtures("each_signal_counts")
def test_the_first_signal_requests_a_stop_and_the_second_ends_at_once(first, second):
    board = ControlBoard()
    told: list[str] = []
    with StopSignals(board, told.append) as signals:
        signals.launched()
        raise_signal(first)
        assert board.stop_reason == first.name
        wait_until(lambda: told)
        assert told == [f"{first.name}: stopping at the next step; a second signal quits at once"]
        with pytest.raises(KeyboardInterrupt):
            raise_signal(second)
    assert board.stop_reason == first.name
    assert len(told) == 1


def test_a_signal_that_is_sent_twice_is_one_request(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr("loopfeed.preprocess.stop_signals.time.monotonic", lambda: now_s[0])
    told: list[str] = []
    with StopSignals(ControlBoard(), told.append) as signals:
        signals.launched()
        for passed_s in (0.0, 0.0, 0.3, 0.1):
            now_s[0] += passed_s
            raise_signal(signal.SIGINT)
        assert len(told) == 1
        now_s[0] += 0.2
        with pytest.raises(KeyboardInterrupt):
            raise_signal(signal.SIGINT)


def test_a_signal_after_a_failure_ends_at_once():
    with StopSignals(ControlBoard(), print) as signals:
        signals.launched()
        signals.failed()
        with pytest.raises(KeyboardInterrupt):
            raise_signal(signal.SIGINT)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_handlers_that_are_no_functions_are_restored(handler):
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with StopSignals(ControlBoard(), print):
            assert signal.getsignal(signal.SIGTERM) not in (handler, before)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_python_did_not_set_becomes_the_default(monkeypatch):
    known = {number: signal.getsignal(number) for number in SIGNALS}
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda _: None)
        signals = StopSignals(ControlBoard(), print).__enter__()
    signals.__exit__(None, None, None)
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_DFL] * len(SIGNALS)
    for number, handler in known.items():
        signal.signal(number, handler)


def test_a_hangup_that_is_ignored_from_the_start_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        board = ControlBoard()
        with StopSignals(board, print):
            raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert board.stop_reason is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_handlers_are_installed_off_the_main_thread():
    before = [signal.getsignal(number) for number in SIGNALS]
    inside: list[object] = []

    def work():
        with StopSignals(ControlBoard(), print) as signals:
            signals.launched()
            inside.extend(signal.getsignal(number) for number in SIGNALS)

    call_on_worker(work)
    assert inside == before


@pytest.mark.parametrize("kind", [LookupError, SystemExit, KeyboardInterrupt])
def test_a_workers_exception_comes_with_its_traceback(kind):
    raised = kind("deep down")

    def deep_down():
        raise raised

    with pytest.raises(kind, match="deep down") as caught:
        call_on_worker(lambda: deep_down())
    assert caught.value is raised
    assert "deep_down" in [frame.name for frame in traceback.extract_tb(raised.__traceback__)]


def test_a_signal_reaches_the_board_while_the_worker_is_busy():
    board = ControlBoard()

    def work():
        deadline = time.monotonic() + SOON_S
        while board.stop_reason is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return board.stop_reason

    with StopSignals(board, lambda words: None) as signals:
        signals.launched()
        timer = send_soon(signal.SIGTERM)
        assert call_on_worker(work) == "SIGTERM"
        timer.join(SOON_S)


def test_an_interrupt_ends_the_wait_for_a_busy_worker():
    release = threading.Event()
    with StopSignals(ControlBoard(), print):
        timer = send_soon(signal.SIGINT)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            call_on_worker(release.wait, SOON_S)
        # Far more than the wait between two looks, far less than the worker's own.
        assert time.monotonic() - started < SOON_S / 2
        timer.join(SOON_S)
    release.set()


def test_a_signal_that_a_supervisor_passes_on_late_is_not_a_second_one(tmp_path, monkeypatch):
    monkeypatch.setenv(BEAT_FILE, str(tmp_path / "0"))
    counted = signals_file(tmp_path / "0")
    told: list[str] = []
    with StopSignals(ControlBoard(), told.append) as signals:
        signals.launched()
        raise_signal(signal.SIGTERM)
        counted.write_text("1")
        raise_signal(signal.SIGTERM)
        assert told == ["SIGTERM: stopping at the next step; a second signal quits at once"]
        counted.write_text("2")
        with pytest.raises(KeyboardInterrupt):
            raise_signal(signal.SIGTERM)
