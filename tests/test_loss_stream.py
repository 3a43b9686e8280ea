"""The loss stream: every record to every sink once and in order, whatever one of them does."""

import gc
import math
import threading
import time
import tracemalloc
import weakref
from functools import partial

import numpy as np
import pytest

from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.crossing.pushed import PushedEvaluation, PushedLosses, PushedSnapshot
from loopfeed.engine.stream import lane, loss_stream, sinks
from loopfeed.engine.stream.loss_stream import LossStream
from loopfeed.engine.stream.sinks import EvaluationProgress
from loopfeed.engine.stream.spooled_losses import SpooledLosses
from tests.waiting import wait_until

# A bound on what must come, long enough for a loaded machine; never waited for where the code is right.
SOON_S = 20.0


class RecordingSink:
    """A sink that keeps its records, and fails where a test requests it."""

    def __init__(self, *, open_error=None, write_error=None, write_error_at=1, close_error=None, gate=None):
        self.open_error, self.write_error, self.close_error = open_error, write_error, close_error
        self.write_error_at, self.gate = write_error_at, gate
        self.calls, self.records, self.threads = [], [], set()

    def open(self):
        self.calls.append("open")
        if self.open_error:
            raise self.open_error

    def write(self, record):
        self.threads.add(threading.current_thread())
        self.calls.append("write")
        if self.gate is not None:
            assert self.gate.wait(SOON_S)
        if self.write_error and record.step >= self.write_error_at:
            raise self.write_error
        self.records.append(record)

    write_evaluation = write

    def close(self):
        self.threads.add(threading.current_thread())
        self.calls.append("close")
        if self.close_error:
            raise self.close_error

    @property
    def steps(self):
        return [record.step for record in self.records]


def pushed(step, *, loss=None, time=None):
    return PushedLosses(step, [10.0 / step if loss is None else loss], [0.5], 100.0 + step if time is None else time)


def make_stream(board=None, wait_of=lambda step: 0.25 * step, **options):
    return LossStream(batch=8, wait_of=wait_of, board=board or ControlBoard(), **options)


def stream_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("loss-stream")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    wait_until(lambda: not stream_threads())


def run_stream(*sinks, steps=5, board=None):
    stream = make_stream(board)
    stream.start(sinks)
    for step in range(1, steps + 1):
        stream.receive(pushed(step))
    stream.close()
    assert not stream_threads()
    return stream


def test_every_record_reaches_every_sink_in_order():
    sinks = [RecordingSink() for _ in range(3)]
    board = ControlBoard()
    stream = run_stream(*sinks, steps=200, board=board)
    for sink in sinks:
        assert sink.steps == list(range(1, 201))
        assert sink.calls == ["open", *["write"] * 200, "close"]
    # Written to and closed on one thread, that of no other sink.
    assert [len(sink.threads) for sink in sinks] == [1, 1, 1]
    assert len(set.union(*(sink.threads for sink in sinks))) == 3
    assert stream.losses.tolist() == [np.float32(10.0 / step) for step in range(1, 201)]
    assert stream.wait_s == sum(0.25 * step for step in range(200))
    assert stream.failure is None
    assert board.stop_reason is None


def test_the_progress_of_an_evaluation_reaches_displaying_sinks_in_order():
    class Showing(RecordingSink):
        def write_progress(self, progress):
            self.records.append(progress)

    showing, other = Showing(), RecordingSink()
    stream = make_stream(step=7)
    stream.start([showing, other])
    stream.report_evaluation(0, 3)
    stream.receive(pushed(8))
    stream.report_evaluation(2, 3)
    stream.close()
    first, _, second = showing.records
    assert (first, second) == (EvaluationProgress(7, 0, 3), EvaluationProgress(8, 2, 3))
    assert showing.records[1] == other.records[0]
    assert len(other.records) == 1


def test_a_hanging_sink_delays_no_evaluation_of_others(monkeypatch):
    monkeypatch.setattr(lane, "MOST_QUEUED", 100)
    taken, goes_on = threading.Event(), threading.Event()

    class Hanging(RecordingSink):
        def write_progress(self, progress):
            taken.set()
            assert goes_on.wait(SOON_S)

    board = ControlBoard()
    stream = make_stream(board)
    stream.start([Hanging()])
    stream.report_evaluation(0, 1000)
    assert taken.wait(SOON_S)
    for batch in range(1, 1000):
        stream.report_evaluation(batch, 1000)
    for step in range(1, 50):
        stream.receive(pushed(step))
    goes_on.set()
    stream.close()
    assert stream.failure is None
    assert board.stop_reason is None


def test_the_fields_of_a_record(monkeypatch):
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


def test_losses_that_come_together_share_the_time_since_those_before(monkeypatch):
    sink = RecordingSink()
    stream = make_stream()
    monkeypatch.setattr(time, "time", lambda: 100.0)
    stream.start([sink])
    stream.receive(PushedLosses(1, [4.0, 3.0, 2.0], [0.5, 0.25, 0.125], 102.0, {"m": [7.0, 8.0, 9.0]}))
    stream.receive(PushedLosses(4, [], [], 103.0))  # pulls that ended in no update
    stream.receive(PushedLosses(4, [1.0], [0.5], 104.0))
    stream.close()
    assert [(record.step, record.loss, record.lr, record.metrics) for record in sink.records] == [
        (1, 4.0, 0.5, {"m": 7.0}),
        (2, 3.0, 0.25, {"m": 8.0}),
        (3, 2.0, 0.125, {"m": 9.0}),
        (4, 1.0, 0.5, {}),
    ]
    assert [record.images_per_s for record in sink.records] == [12.0, 12.0, 12.0, 4.0]
    assert [record.wait_ms for record in sink.records] == [0.0, 250.0, 500.0, 750.0]
    assert [record.time for record in sink.records] == pytest.approx([100 + 2 / 3, 100 + 4 / 3, 102.0, 104.0])
    assert stream.losses.tolist() == [4.0, 3.0, 2.0, 1.0]


@pytest.mark.parametrize("error", [OSError("the disk is full"), SystemExit(3)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_failed_sink_is_dropped(error, place):
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


def test_the_first_failure_stays():
    first, second = OSError("first"), OSError("second")
    gate = threading.Event()
    late = RecordingSink(write_error=second, gate=gate)
    stream = make_stream()
    stream.start([late, RecordingSink(write_error=first)])
    stream.receive(pushed(1))
    wait_until(lambda: stream.failure is not None)
    gate.set()
    stream.close()
    assert late.calls == ["open", "write", "close"]
    assert stream.failure is first


@pytest.mark.parametrize("place", [0, 1, 2])
def test_if_a_sink_cannot_open_none_stays_open(place):
    error = PermissionError("no such luck")
    sinks = [RecordingSink() for _ in range(3)]
    sinks[place] = RecordingSink(open_error=error)
    stream = make_stream()
    with pytest.raises(PermissionError, match="no such luck") as caught:
        stream.start(sinks)
    assert caught.value is error
    stream.close()
    assert [sink.calls for sink in sinks] == [["open", "close"]] * place + [["open"]] + [[]] * (2 - place)


def test_a_slow_sink_slows_the_program(monkeypatch):
    monkeypatch.setattr(lane, "MOST_QUEUED", 4)
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


def test_no_snapshot_waits_in_memory_behind_a_sink_that_is_held():
    gate = threading.Event()
    stream = make_stream()
    stream.start([RecordingSink(gate=gate)])
    stream.receive(pushed(1))
    state = np.zeros(1)
    held = weakref.ref(state)
    stream.receive(PushedSnapshot(1, 1, state))
    del state
    assert held() is None
    gate.set()
    stream.close()
    assert stream.failure is None


def test_a_sink_that_accepts_nothing_within_the_limit_is_an_error_and_dropped(monkeypatch):
    monkeypatch.setattr(lane, "MOST_QUEUED", 2)
    monkeypatch.setattr(loss_stream, "_PUSH_TIMEOUT_S", 0.05)
    gate = threading.Event()
    hanging, healthy = RecordingSink(gate=gate), RecordingSink()
    board = ControlBoard()
    stream = make_stream(board)
    stream.start([hanging, healthy])
    for step in range(1, 10):
        stream.receive(pushed(step))
    assert board.stop_reason == "a sink of the loss stream failed"
    stream.close()
    assert healthy.steps == list(range(1, 10))
    assert healthy.calls[-1] == "close"
    with pytest.raises(
        TimeoutError,
        match=r"a sink must accept a loss within 0\.05 s, but RecordingSink did not, .* check the terminal",
    ):
        raise stream.failure
    assert "close" not in hanging.calls
    # What was queued for it is still handed over where it goes on after all.
    gate.set()
    wait_until(lambda: "close" in hanging.calls)
    assert hanging.steps == [1, 2, 3, 4]


def test_a_stop_ends_the_wait_for_room_and_loses_nothing(monkeypatch):
    monkeypatch.setattr(lane, "MOST_QUEUED", 2)
    gate = threading.Event()
    sink = RecordingSink(gate=gate)
    board = ControlBoard()
    stream = make_stream(board)
    stream.start([sink])
    received = []

    def program():
        for step in range(1, 7):
            stream.receive(pushed(step))
            received.append(step)

    thread = threading.Thread(target=program)
    thread.start()
    wait_until(lambda: received == [1, 2, 3])
    thread.join(0.1)
    assert received == [1, 2, 3]
    board.request_stop("SIGTERM")
    # Far less than the minute that a sink has.
    thread.join(SOON_S)
    assert received == [1, 2, 3, 4, 5, 6]
    gate.set()
    stream.close()
    assert sink.steps == [1, 2, 3, 4, 5, 6]
    assert stream.failure is None


def test_one_limit_for_all_sinks_that_hang_and_the_others_are_flushed():
    gate = threading.Event()
    hanging = [RecordingSink(gate=gate) for _ in range(20)]
    healthy = RecordingSink()
    stream = make_stream()
    stream.start([*hanging, healthy])
    for step in range(1, 2001):
        stream.receive(pushed(step))
    started = time.monotonic()
    stream.close(1.0)
    # Far less than a second for each of the twenty.
    assert time.monotonic() - started < 10
    assert healthy.steps == list(range(1, 2001))
    assert healthy.calls[-1] == "close"
    with pytest.raises(TimeoutError, match=r"sinks must accept the last losses in time, but RecordingSink and Rec"):
        raise stream.failure
    gate.set()
    stream.close()
    assert all(sink.calls[-1] == "close" and len(sink.records) == 2000 for sink in hanging)


@pytest.mark.parametrize("is_asked_before", [True, False])
def test_after_a_stop_a_blocked_sink_is_abandoned_soon(monkeypatch, is_asked_before):
    monkeypatch.setattr(loss_stream, "_STOP_PATIENCE_S", 0.05)
    gate = threading.Event()
    sink = RecordingSink(gate=gate)
    board = ControlBoard()
    stream = make_stream(board)
    stream.start([sink])
    stream.receive(pushed(1))
    timer = threading.Timer(0.0 if is_asked_before else 0.2, board.request_stop, ["SIGTERM"])
    timer.start()
    if is_asked_before:
        timer.join()
    started = time.monotonic()
    stream.close()
    assert time.monotonic() - started < SOON_S
    assert isinstance(stream.failure, TimeoutError)
    gate.set()
    timer.join()


def test_a_sink_that_hangs_on_closing_does_not_delay_the_others():
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
    stream.close(0.05)
    # Far more than the limit, far less than the sink's own.
    assert time.monotonic() - started < SOON_S / 2
    assert isinstance(stream.failure, TimeoutError)
    assert board.stop_reason == "a sink of the loss stream failed"
    gate.set()


def test_an_evaluation_without_images_or_top5_has_no_such_numbers():
    stream = make_stream()
    stream.start([])
    stream.receive(PushedEvaluation(1, num_images=0, top1=0, top5=0, loss=math.nan, time=109.0))
    stream.receive(PushedEvaluation(1, num_images=4, top1=1, top5=None, loss=1.0, time=109.0))
    stream.close()
    empty, ranked = stream.evaluations
    assert math.isnan(empty.top1)
    assert math.isnan(empty.top5)
    assert (ranked.top1, math.isnan(ranked.top5)) == (0.25, True)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_the_first_non_finite_loss_is_reported_once(loss):
    told: list[int] = []
    sink = RecordingSink()
    board = ControlBoard()
    stream = make_stream(board, on_nonfinite=told.append)
    stream.start([sink])
    for step in (1, 2, 3, 4, 5):
        stream.receive(pushed(step, loss=1.0) if step in (1, 4) else pushed(step, loss=loss))
    stream.close()
    wait_until(lambda: told)
    assert told == [2]
    assert sink.steps == [1, 2, 3, 4, 5]
    assert board.stop_reason is None


def test_losses_without_number_take_no_memory(monkeypatch):
    monkeypatch.setattr(loss_stream, "SpooledLosses", partial(SpooledLosses, 1 << 12))
    stream = make_stream(wait_of=lambda _: 0.0)
    stream.start([])
    gc.collect()
    try:
        for first in range(1, 24_001, 1000):
            if first == 4_001:
                tracemalloc.start()
            stream.receive(PushedLosses(first, [2.5] * 1000, [0.1] * 1000, float(first)))
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    stream.close()
    assert stream.num_losses == 24_000
    assert stream.losses.shape == (24_000,)
    stream.release()
    # By 20,000 losses: a Python float for each would be 32 bytes, a number in an array 4; what is held in memory, 4
    # bytes for each of 4,096, comes and goes.
    assert grown < 60_000


def listed(step, num_numbers):
    values = {"confusion": [[step] * num_numbers], "f1": 0.5}
    return PushedEvaluation(step, num_images=8, top1=2, top5=6, loss=1.5, time=100.0 + step, metrics=values)


def test_evaluations_with_long_lists_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(loss_stream, "MOST_LISTED_NUMBERS", 100)
    stream, sink = make_stream(), RecordingSink()
    stream.start([sink])
    for step in range(1, 21):
        stream.receive(listed(step, 30))
    stream.receive(listed(21, 200))
    stream.close()
    assert [each.metrics for each in sink.records] == [listed(step, 30).metrics for step in range(1, 21)] + [
        listed(21, 200).metrics
    ]
    assert [each.num_listed for each in stream.evaluations] == [0] * 20 + [200]
    assert [each.without_lists() for each in sink.records] == [each.without_lists() for each in stream.evaluations]
    assert {each.metrics["f1"] for each in stream.evaluations} == {0.5}


def test_the_lists_of_an_evaluation_are_counted_once_whoever_gets_it(monkeypatch):
    counted, real = [], sinks._count_numbers

    def count(values):
        counted.append(len(values))
        return real(values)

    monkeypatch.setattr(sinks, "_count_numbers", count)
    stream = make_stream()
    stream.start([RecordingSink(), RecordingSink()])
    stream.receive(
        PushedEvaluation(1, num_images=8, top1=2, top5=6, loss=1.5, time=1.0, metrics={"recalls": [0.5] * 30})
    )
    stream.close()
    assert counted == [30]


def test_a_sink_that_is_behind_with_long_lists_is_waited_for(monkeypatch):
    monkeypatch.setattr(lane, "_MOST_LISTED_NUMBERS", 100)
    gate = threading.Event()
    stream, sink = make_stream(), RecordingSink(gate=gate)
    stream.start([sink])
    for step in range(1, 4):
        stream.receive(listed(step, 30))
    waiting = threading.Thread(target=lambda: stream.receive(listed(4, 30)), daemon=True)
    waiting.start()
    wait_until(lambda: stream.blocked_by == "RecordingSink")
    gate.set()
    waiting.join(SOON_S)
    assert not waiting.is_alive()
    stream.close()
    assert sink.steps == [1, 2, 3, 4]


def test_a_clock_set_back_results_in_no_rate():
    sink = RecordingSink()
    stream = make_stream()
    stream.start([sink])
    for step, at in ((1, 5.0), (2, 5.0), (3, 3.0), (4, 5.0)):
        stream.receive(pushed(step, time=at))
    stream.close()
    assert [str(record.images_per_s) for record in sink.records] == ["nan", "nan", "nan", "4.0"]


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


def test_evaluations_come_in_their_order():
    sinks = [RecordingSink(), RecordingSink()]
    stream = make_stream()
    stream.start(sinks)
    stream.receive(pushed(1, time=101.0))
    stream.receive(PushedEvaluation(1, num_images=8, top1=2, top5=6, loss=1.5, time=109.0))
    stream.receive(pushed(2, time=110.0))
    stream.close()
    for sink in sinks:
        first, evaluation, second = sink.records
        assert (first.step, evaluation.step, second.step) == (1, 1, 2)
        assert (evaluation.top1, evaluation.top5, evaluation.loss) == (0.25, 0.75, 1.5)
        assert second.images_per_s == 8.0
    assert stream.evaluations == [sinks[0].records[1]]
