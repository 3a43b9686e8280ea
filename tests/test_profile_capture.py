"""When traces begin and end, with a profiler that only counts, and batches that are drawn by hand."""

import threading
import time

import pytest

from loopfeed.engine.profile.capture import Capture, Window, _never
from loopfeed.engine.scopes import TRAIN, VALID
from tests.waiting import wait_until

LIMIT_S = 20.0


class FakeProfiler:
    """A profiler whose traces are their numbers; `collected` must be set before a trace ends."""

    def __init__(self, monkeypatch):
        self.num_begun = self.num_ended = 0
        self.collected = threading.Event()
        self.collected.set()
        monkeypatch.setattr("loopfeed.engine.profile.capture._start", self.start)

    def start(self):
        self.num_begun += 1
        return self.stop

    def stop(self):
        self.collected.wait(LIMIT_S)
        self.num_ended += 1
        return self.num_ended


@pytest.fixture
def profiler(monkeypatch):
    return FakeProfiler(monkeypatch)


def remains(condition):
    """Assert that a condition still holds after the thread had time to end it."""
    time.sleep(0.05)
    assert condition()


def is_tracing(profiler, capture):
    """Wait until the first trace has begun and its end is awaited."""
    wait_until(lambda: profiler.num_begun == 1 and capture._is_awaited not in (capture._is_due, _never))


@pytest.fixture
def begin():
    """Return a function that starts a capture; all of them are ended after the test."""
    begun = []

    def start(*, said=None, **windows):
        capture = Capture(windows, (said if said is not None else []).append)
        begun.append(capture)
        capture.start()
        return capture

    yield start
    for capture in begun:
        capture.abandon()
        assert capture._worker.wait(LIMIT_S)


def test_a_window_begins_before_its_first_batch_and_ends_when_the_batch_after_it_is_over(profiler, begin):
    capture = begin(train=Window(2, 3))
    capture.batches_drawn(TRAIN, 1)
    remains(lambda: profiler.num_begun == 0)
    capture.batches_drawn(TRAIN, 1)
    is_tracing(profiler, capture)
    # Batches 2, 3 and 4, and 5, whose draw ends the last of them.
    for _ in range(4):
        capture.batches_drawn(TRAIN, 1)
    remains(lambda: profiler.num_ended == 0)
    capture.batches_drawn(TRAIN, 1)
    wait_until(lambda: profiler.num_ended == 1)
    capture.stop()
    assert capture.traces[TRAIN].first == {TRAIN: 2, VALID: 0}
    assert (capture.traces[TRAIN].data, profiler.num_begun) == (1, 1)


def test_batches_that_are_drawn_at_once_are_traced_until_the_draw_after_them_is_over(profiler, begin):
    def pull():
        capture.pull_began(TRAIN)
        capture.batches_drawn(TRAIN, 3)

    capture = begin(train=Window(1, 5, chunk=4))
    capture.pull_began(TRAIN)
    is_tracing(profiler, capture)
    # The pull that had begun before the trace is not in it; two whole ones have at least five batches.
    capture.batches_drawn(TRAIN, 3)
    pull()
    pull()
    remains(lambda: profiler.num_ended == 0)
    pull()
    wait_until(lambda: TRAIN in capture.traces)
    assert capture.traces[TRAIN].first[TRAIN] == 4


def test_an_evaluation_is_traced_from_its_start_until_training_resumes(profiler, begin, monkeypatch):
    monkeypatch.setattr("loopfeed.engine.profile.capture._MOST_TRACED_S", 1000.0)
    capture = begin(valid=Window(5, 10))
    capture.batches_drawn(TRAIN, 5)
    is_tracing(profiler, capture)
    remains(lambda: profiler.num_ended == 0)
    capture.batches_drawn(VALID, 4)
    capture.batches_drawn(TRAIN, 1)
    remains(lambda: profiler.num_ended == 0)
    capture.batches_drawn(TRAIN, 1)
    wait_until(lambda: profiler.num_ended == 1)
    capture.stop()
    assert capture.traces[VALID].first == {TRAIN: 5, VALID: 0}


def test_a_window_ends_when_the_trace_takes_too_much_memory(profiler, begin, monkeypatch):
    used = iter([5 << 30])
    monkeypatch.setattr("loopfeed.engine.profile.capture.process_memory_bytes", lambda: next(used, 7 << 30))
    capture = begin(train=Window(0, 500, is_chosen=True))
    wait_until(lambda: TRAIN in capture.traces)
    assert capture.traces[TRAIN].limit == "1,024 MiB"


def test_the_end_of_the_loop_ends_a_trace_and_begins_none(profiler, begin):
    capture = begin(train=Window(1, 100), valid=Window(50, 1))
    capture.batches_drawn(TRAIN, 1)
    is_tracing(profiler, capture)
    capture.stop()
    assert (profiler.num_ended, list(capture.traces)) == (1, [TRAIN])
    late = begin(train=Window(1, 100))
    late.stop()
    assert (profiler.num_begun, late.traces) == (1, {})


def test_a_trace_that_is_not_collected_in_time_is_left_out(profiler, begin, monkeypatch):
    monkeypatch.setattr("loopfeed.engine.profile.capture._CLOSE_TIMEOUT_S", 0.05)
    said: list[str] = []
    capture = begin(train=Window(0, 100), said=said)
    is_tracing(profiler, capture)
    profiler.collected.clear()
    capture.stop()
    assert capture.traces == {}
    assert said == ["warning: the trace of the profile was not collected in time, so the profile has no operations"]
    profiler.collected.set()
    capture._worker.wait(LIMIT_S)
    assert capture.traces == {}


def test_a_profiler_that_fails_is_reported_once(monkeypatch, begin):
    def refuse():
        raise RuntimeError("another profile is in progress")

    monkeypatch.setattr("loopfeed.engine.profile.capture._start", refuse)
    said: list[str] = []
    capture = begin(train=Window(0, 10), valid=Window(0, 10), said=said)
    capture._worker.wait(LIMIT_S)
    capture.stop()
    assert said == [
        "warning: the operations could not be traced (RuntimeError: another profile is in progress); if your own code "
        "traces with jax's profiler, end its trace before the run, or run without --profile"
    ]


@pytest.mark.parametrize("is_chosen", [False, True])
def test_a_window_ends_by_time_after_a_few_batches(profiler, begin, monkeypatch, is_chosen):
    monkeypatch.setattr(f"loopfeed.engine.profile.capture._MOST_{'CHOSEN' if is_chosen else 'TRACED'}_S", 0.01)
    capture = begin(train=Window(0, 500, is_chosen))
    is_tracing(profiler, capture)
    capture.batches_drawn(TRAIN, 4)
    remains(lambda: profiler.num_ended == 0)
    capture.batches_drawn(TRAIN, 1)
    wait_until(lambda: TRAIN in capture.traces)
    assert capture.traces[TRAIN].limit == "0.01 s"


def test_a_window_ends_after_as_many_batches_as_a_trace_can_hold(profiler, begin, monkeypatch):
    monkeypatch.setattr("loopfeed.engine.profile.capture._MOST_BATCHES", 3)
    capture = begin(train=Window(0, 2**31, is_chosen=True))
    is_tracing(profiler, capture)
    capture.batches_drawn(TRAIN, 5)
    wait_until(lambda: TRAIN in capture.traces)
    assert capture.traces[TRAIN].limit == "3 batches"


def test_an_evaluation_in_the_window_of_training_is_not_traced_again(profiler, begin):
    capture = begin(train=Window(0, 6), valid=Window(3, 4))
    is_tracing(profiler, capture)
    capture.batches_drawn(TRAIN, 3)
    capture.batches_drawn(VALID, 4)
    capture.batches_drawn(TRAIN, 5)
    wait_until(lambda: profiler.num_ended == 1)
    capture.batches_drawn(VALID, 4)
    remains(lambda: profiler.num_begun == 1)
    capture.stop()
    assert list(capture.traces) == [TRAIN]


def test_batches_wake_nothing_while_a_trace_is_collected_and_when_the_windows_are_over(profiler, begin):
    capture = begin(train=Window(0, 1))
    is_tracing(profiler, capture)
    profiler.collected.clear()
    capture.batches_drawn(TRAIN, 3)
    wait_until(lambda: capture._is_awaited == _never)
    profiler.collected.set()
    assert capture._worker.wait(LIMIT_S)
    capture._changed.clear()
    capture.batches_drawn(TRAIN, 1)
    assert not capture._changed.is_set()
