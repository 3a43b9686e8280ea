"""Notices during a run: in order, on a separate thread, and harmless if they cannot be delivered."""

import threading
import time

import pytest

from loopfeed.engine.stream.notices import Notices

SOON_S = 20.0


def test_notices_are_delivered_in_order_on_another_thread_and_before_the_end():
    told: list[tuple[str, threading.Thread]] = []
    notices = Notices(lambda words: told.append((words, threading.current_thread())))
    notices.say("before the start")
    notices.start()
    for number in range(50):
        notices.say(str(number))
    notices.close()
    assert [words for words, _ in told] == ["before the start", *map(str, range(50))]
    assert {thread is threading.main_thread() for _, thread in told} == {False}
    assert {thread.name for _, thread in told} == {"spare notices"}


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), RuntimeError("reentrant call inside <_io.BufferedWriter>")]
)
def test_a_failed_notice_delays_nothing_and_the_next_is_tried(error):
    told: list[str] = []

    def fail(words):
        told.append(words)
        raise error

    notices = Notices(fail)
    notices.start()
    notices.say("first")
    notices.say("second")
    notices.close()
    assert told == ["first", "second"]


def test_a_blocked_terminal_blocks_neither_the_sender_nor_the_end():
    gate, is_telling = threading.Event(), threading.Event()

    def block(words):
        is_telling.set()
        assert gate.wait(SOON_S)

    notices = Notices(block)
    notices.start()
    started = time.monotonic()
    notices.say("held")
    assert is_telling.wait(SOON_S)
    for _ in range(100):
        notices.say("waiting")
    notices.close()
    # Far more than the limit of the last words, far less than the terminal's own.
    assert time.monotonic() - started < SOON_S / 2
    gate.set()
