"""The control word: written by the host, read by the device, asked for from any thread."""

import itertools
import threading

import jax
import numpy as np
import pytest

from engine.control import CONTROL_WORDS, EVALUATE, SNAPSHOT, STOP, ControlBoard, decode_control, encode_control


@pytest.mark.parametrize(
    "flags", [sum(chosen) for chosen in itertools.product((0, STOP), (0, SNAPSHOT), (0, EVALUATE))]
)
@pytest.mark.parametrize("factor", [1.0, 0.1, 0.0, 1e-30, -2.5])
def test_the_device_reads_what_the_host_wrote(flags, factor):
    words = encode_control(flags, factor)
    assert words.dtype == np.uint32
    assert words.shape == (CONTROL_WORDS,)
    word = jax.jit(decode_control)(words)
    assert bool(word.stop) == bool(flags & STOP)
    assert bool(word.snapshot) == bool(flags & SNAPSHOT)
    assert bool(word.evaluate) == bool(flags & EVALUATE)
    assert word.learning_rate_factor.dtype == np.float32
    assert np.asarray(word.learning_rate_factor) == np.float32(factor)


def test_golden_words():
    assert encode_control().tolist() == [0, 0x3F800000]
    assert encode_control(STOP | EVALUATE, 0.5).tolist() == [0b101, 0x3F000000]


def test_zeros_ask_for_nothing_but_a_rate_of_nothing():
    # What a pull answers where the host could write no word at all.
    word = decode_control(jax.numpy.zeros(CONTROL_WORDS, jax.numpy.uint32))
    assert [float(value) for value in word] == [0, 0, 0, 0]


def test_a_board_asks_for_nothing_until_it_is_told():
    board = ControlBoard()
    assert board.stop_reason is None
    assert board.words(0).tolist() == board.stop_words().tolist() == encode_control().tolist()
    board.request_stop("SIGINT")
    assert board.words(1).tolist() == board.stop_words().tolist() == encode_control(STOP).tolist()


def test_the_first_reason_stays():
    board = ControlBoard()
    board.request_stop("SIGTERM")
    board.request_stop("a sink of the loss stream failed")
    assert board.stop_reason == "SIGTERM"


def test_one_reason_wins_among_threads():
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
