"""The loss stream: every record to every sink once and in order, whatever one of them does."""

import threading
import time

import pytest

from engine import loss_stream
from engine.control import ControlBoard
from engine.loss_stream import LossStream
from engine.outfeed import PushedLoss

# A bound on what must come, long enough for a loaded machine; never waited for where the code is right.
SOON_S = 20.0


class RecordingSink:
    """Keeps what it gets, and fails where a test asks."""

    def __init__(self, *, open_error=None, write_error=None, write_error_at=1, close_error=None, gate=None):
        self.open_error, self.write_error, self.close_error = open_error, write_error, close_error
        self.write_error_at, self.gate = write_error_at, gate
        self.calls, self.records, self.threads = [], [], set()

    def open(self):
        self.calls.append("open")
        if self.open_error:
            raise self.open_error

    def write(self, record):
        self.threads.add(threading.current_thread().name)
        self.calls.append("write")
        if self.gate is not None:
            assert self.gate.wait(SOON_S)
        if self.write_error and record.step >= self.write_error_at:
            raise self.write_error
        self.records.append(record)

    def close(self):
        self.threads.add(threading.current_thread().name)
        self.calls.append("close")
        if self.close_error:
            raise self.close_error

    @property
    def steps(self):
        return [record.step for record in self.records]


def pushed(step, **changes):
    return PushedLoss(step, loss=10.0 / step, learning_rate=0.5, time=100.0 + step)._replace(**changes)


def make_stream(board=None, wait_of=lambda step: 0.25 * step):
    return LossStream(batch=8, wait_of=wait_of, board=board or ControlBoard())


def run_stream(*sinks, steps=5, board=None):
    stream = make_stream(board)
    stream.start(sinks)
    for step in range(1, steps + 1):
        stream.receive(pushed(step))
    stream.close()
    assert not stream._thread.is_alive()
    return stream


def test_every_record_reaches_every_sink_in_order():
    sinks = [RecordingSink() for _ in range(3)]
    board = ControlBoard()
    stream = run_stream(*sinks, steps=200, board=board)
    for sink in sinks:
        assert sink.steps == list(range(1, 201))
        assert sink.calls == ["open", *["write"] * 200, "close"]
        assert sink.threads == {"loss-stream"}
    assert stream.losses == [10.0 / step for step in range(1, 201)]
    assert stream.wait_s == sum(0.25 * step for step in range(200))
    assert stream.failure is None
    assert board.stop_reason is None


def test_what_a_record_says(monkeypatch):
    sink = RecordingSink()
    stream = make_stream()
    monkeypatch.setattr(time, "time", lambda: 100.0)
    stream.start([sink])
    stream.receive(pushed(1, time=100.5))
    stream.receive(pushed(2, time=102.5))
    stream.close()
    first, second = sink.records
    assert (first.step, first.loss, first.lr, first.time) == (1, 10.0, 0.5, 100.5)
    assert (first.images_per_s, second.images_per_s) == (16.0, 4.0)
    assert (first.wait_ms, second.wait_ms) == (0.0, 250.0)


def test_a_clock_set_back_gives_no_rate():
    sink = RecordingSink()
    stream = make_stream()
    stream.start([sink])
    for step, at in ((1, 5.0), (2, 5.0), (3, 3.0), (4, 5.0)):
        stream.receive(pushed(step, time=at))
    stream.close()
    assert [str(record.images_per_s) for record in sink.records] == ["nan", "nan", "nan", "4.0"]


@pytest.mark.parametrize("error", [OSError("the disk is full"), SystemExit(3)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_sink_that_fails_is_left_out(error, place):
    sinks = [RecordingSink() for _ in range(3)]
    sinks[place] = RecordingSink(write_error=error, write_error_at=3)
    board = ControlBoard()
    stream = run_stream(*sinks, steps=6, board=board)
    assert stream.failure is error
    assert board.stop_reason == "a sink of the loss stream failed"
    assert sinks[place].calls == ["open", "write", "write", "write", "close"]
    for sink in sinks[:place] + sinks[place + 1 :]:
        assert sink.steps == [1, 2, 3, 4, 5, 6]
        assert sink.calls[-1] == "close"
    assert len(stream.losses) == 6


def test_equal_sinks_are_told_apart():
    class Equal(RecordingSink):
        def __eq__(self, other):
            return True

    healthy, failing = Equal(), Equal(write_error=OSError("gone"))
    run_stream(healthy, failing, steps=4)
    assert healthy.steps == [1, 2, 3, 4]
    assert failing.calls == ["open", "write", "close"]


def test_the_first_failure_stays():
    first, second = OSError("first"), OSError("second")
    stream = run_stream(
        RecordingSink(write_error=second, write_error_at=4), RecordingSink(write_error=first, write_error_at=2)
    )
    assert stream.failure is first


def test_when_all_sinks_fail_losses_are_still_kept():
    stream = run_stream(RecordingSink(write_error=OSError("gone")), steps=50)
    assert stream.losses == [10.0 / step for step in range(1, 51)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_sink_that_cannot_open_leaves_none_open(place):
    error = PermissionError("no such luck")
    sinks = [RecordingSink() for _ in range(3)]
    sinks[place] = RecordingSink(open_error=error)
    stream = make_stream()
    with pytest.raises(PermissionError, match="no such luck") as caught:
        stream.start(sinks)
    assert caught.value is error
    stream.close()
    assert [sink.calls for sink in sinks] == [["open", "close"]] * place + [["open"]] + [[]] * (2 - place)


def test_the_sinks_before_one_that_cannot_open_are_all_closed():
    # Even where closing the first fails too; the error of the opening is the one that counts.
    first, second = RecordingSink(close_error=OSError("busy")), RecordingSink()
    stream = make_stream()
    with pytest.raises(PermissionError, match="denied"):
        stream.start([first, second, RecordingSink(open_error=PermissionError("denied"))])
    assert first.calls == second.calls == ["open", "close"]


def test_a_sink_that_fails_in_closing_leaves_the_others_closed():
    error = OSError("the disk is full")
    sinks = [RecordingSink(close_error=error), RecordingSink()]
    stream = run_stream(*sinks)
    assert stream.failure is error
    assert sinks[1].calls[-1] == "close"


def test_closing_twice_closes_once():
    sink = RecordingSink()
    run_stream(sink).close()
    assert sink.calls.count("close") == 1


def test_closing_a_stream_that_never_started():
    stream = make_stream()
    stream.close()
    assert stream.failure is None


def test_a_stream_without_sinks_keeps_the_losses():
    assert run_stream(steps=3).losses == [10.0, 5.0, 10.0 / 3]


def test_a_slow_sink_slows_the_program(monkeypatch):
    monkeypatch.setattr(loss_stream, "_MOST_QUEUED", 4)
    gate = threading.Event()
    sink = RecordingSink(gate=gate)
    stream = make_stream()
    stream.start([sink])
    received = []

    def program():
        for step in range(1, 21):
            stream.receive(pushed(step))
            received.append(step)

    thread = threading.Thread(target=program)
    thread.start()
    # One record is with the sink, four are queued, and the next is waiting to be.
    deadline = time.monotonic() + SOON_S
    while len(received) < 5 and time.monotonic() < deadline:
        time.sleep(0.001)
    thread.join(0.05)
    assert received == [1, 2, 3, 4, 5]
    gate.set()
    thread.join(SOON_S)
    stream.close()
    assert sink.steps == list(range(1, 21))
    assert stream.failure is None


def test_a_sink_that_hangs_is_an_error_within_the_limit(monkeypatch):
    monkeypatch.setattr(loss_stream, "_MOST_QUEUED", 2)
    monkeypatch.setattr(loss_stream, "_PUSH_TIMEOUT_S", 0.05)
    monkeypatch.setattr(loss_stream, "_CLOSE_TIMEOUT_S", 0.05)
    gate = threading.Event()
    sink = RecordingSink(gate=gate)
    stream = make_stream()
    stream.start([sink])

    def program():
        for step in range(1, 10):
            stream.receive(pushed(step))

    with pytest.raises(
        TimeoutError, match=r"the loss stream must be read within 0\.05 s, and 2 losses wait: free the terminal"
    ):
        program()
    stream.close()
    assert "close" not in sink.calls
    with pytest.raises(TimeoutError, match=r"the sinks must take the last losses within 0\.05 s, and did not"):
        raise stream.failure
    gate.set()
    monkeypatch.setattr(loss_stream, "_CLOSE_TIMEOUT_S", SOON_S)
    stream.close()
    assert sink.calls[-1] == "close"


def test_a_sink_that_hangs_in_closing_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(loss_stream, "_CLOSE_TIMEOUT_S", 0.05)
    gate = threading.Event()

    class Hanging(RecordingSink):
        def close(self):
            gate.wait(SOON_S)
            super().close()

    board = ControlBoard()
    stream = make_stream(board)
    stream.start([Hanging()])
    stream.receive(pushed(1))
    started = time.monotonic()
    stream.close()
    # Far more than the limit, far less than the sink's own.
    assert time.monotonic() - started < SOON_S / 2
    assert isinstance(stream.failure, TimeoutError)
    assert board.stop_reason == "a sink of the loss stream failed"
    gate.set()
    stream._thread.join(SOON_S)
    assert not stream._thread.is_alive()
