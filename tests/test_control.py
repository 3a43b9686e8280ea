"""The control word: written by the host, read by the device, requested from any thread."""

import itertools
import threading

import jax
import numpy as np
import pytest

from loopfeed.engine.control.board import (
    CONTROL_WORDS,
    EVALUATE,
    SNAPSHOT,
    STOP,
    ControlBoard,
    decode_control,
    encode_control,
    stop_at_once,
)
from loopfeed.engine.control.request import ControlEvent


@pytest.mark.parametrize(
    "flags", [sum(chosen) for chosen in itertools.product((0, STOP), (0, SNAPSHOT), (0, EVALUATE))]
)
@pytest.mark.parametrize("factor", [1.0, 0.1, 0.0, 1e-30, -2.5])
@pytest.mark.parametrize("num_batches", [0, 1, 1024])
def test_the_device_reads_what_the_host_wrote(flags, factor, num_batches):
    words = encode_control(flags, factor, num_batches)
    assert len(words) == CONTROL_WORDS
    word = jax.jit(decode_control)(np.array(words, np.uint32))
    assert bool(word.stop) == (bool(flags & STOP) or num_batches == 0)
    assert bool(word.snapshot) == bool(flags & SNAPSHOT)
    assert bool(word.evaluate) == bool(flags & EVALUATE)
    assert word.learning_rate_factor.dtype == np.float32
    assert np.asarray(word.learning_rate_factor) == np.float32(factor)
    assert word.num_batches.dtype == np.int32
    assert word.num_batches == num_batches


def test_golden_words():
    assert encode_control(STOP | EVALUATE, 0.5, 7) == (0b101, 0x3F000000, 7)
    assert stop_at_once() == (0b001, 0x3F800000, 0)


def test_zeros_request_nothing_but_the_end_of_the_loop():
    # What a pull answers where the host could write no word at all; without batches there is nothing else to do.
    word = decode_control(jax.numpy.zeros(CONTROL_WORDS, jax.numpy.uint32))
    assert [float(value) for value in word] == [1, 0, 0, 0, 0]


def test_a_chunk_ends_where_a_request_of_an_earlier_launch_took_effect():
    def event(pull, **values):
        given = {"learning_rate_factor": None, "snapshot": False, "evaluate": False, "stop": False}
        return ControlEvent(pull=pull, step=pull + 1, request=f"{pull}-a", time=1.0, **(given | values))

    board = ControlBoard()
    events = [event(3, learning_rate_factor=0.5), event(6, evaluate=True), event(7, snapshot=True)]
    board.prepare(first_batch=4, batches_per_step=1, replayed=events, record=lambda _: None)
    assert board.words(4, 4) == encode_control(0, 0.5, 2)
    assert board.words(6, 4) == encode_control(EVALUATE, 0.5, 1)
    assert board.words(7, 4) == encode_control(SNAPSHOT, 0.5, 1)  # behind this batch, whatever is wanted
    assert board.words(8, 4) == encode_control(0, 0.5, 4)


def test_the_first_stop_reason_is_kept():
    board = ControlBoard()
    board.request_stop("SIGTERM")
    board.request_stop("a sink of the loss stream failed")
    assert board.stop_reason == "SIGTERM"


def test_one_stop_reason_wins_among_threads():
    board = ControlBoard()
    start = threading.Barrier(8)
    seen = []

    def ask(number):
        start.wait(timeout=10)
        board.request_stop(str(number))
        seen.append(board.stop_reason)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(seen) == 8
    assert set(seen) == {board.stop_reason}


def test_a_request_may_interrupt_a_request_on_the_same_thread():
    # As a signal handler does: with a plain lock this would wait for itself for ever.
    board = ControlBoard()
    with board._lock:
        board.request_stop("SIGINT")
    assert board.stop_reason == "SIGINT"


def test_a_new_board_requests_nothing():
    board = ControlBoard()
    assert board.stop_reason is None
    assert board.words(0, 3) == board.stop_words(3) == encode_control(0, 1.0, 3)
    board.request_stop("SIGINT")
    assert board.words(3, 3) == board.stop_words(3) == stop_at_once()
