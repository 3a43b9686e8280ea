"""Signals act between the pieces of work that must be whole, each once."""

import signal
from contextlib import contextmanager

import pytest

from loopfeed.engine.commands.held_signals import signals_held

NUMBERS = [signal.SIGINT, signal.SIGTERM]


@contextmanager
def ended_by_sigterm(done):
    """Notes what would end the process."""
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: done.append("SIGTERM"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interrupted(numbers_of_item, done):
    """Works on items 0, 1, 2; while item K is worked on, or waited for where K is negative, signals come."""

    def items():
        for item in range(3):
            for number in numbers_of_item.get(-1 - item, ()):
                signal.raise_signal(number)
            yield item

    with signals_held() as signals:
        try:
            for item in signals.let_in(items()):
                for number in numbers_of_item.get(item, ()):
                    signal.raise_signal(number)
                done.append(item)
        finally:
            done.append("restored")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_interrupts_waiting_but_not_working(number):
    before = [signal.getsignal(each) for each in NUMBERS]
    done: list[object] = []
    with pytest.raises(SystemExit) as caught:
        interrupted({1: [number]}, done)
    assert (caught.value.code, done) == (128 + number, [0, 1, "restored"])
    done = []
    with pytest.raises(SystemExit) as caught:
        interrupted({-2: [number]}, done)
    assert (caught.value.code, done) == (128 + number, [0, "restored"])
    assert [signal.getsignal(each) for each in NUMBERS] == before


def test_a_second_signal_waits_for_what_the_first_left_to_do():
    done: list[object] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted({0: [signal.SIGTERM, signal.SIGINT]}, done)
    assert done == [0, "restored"]


def test_a_signal_behind_the_last_item_acts_when_the_block_ends():
    done: list[object] = []

    def work() -> None:
        with signals_held() as signals:
            done.extend(signals.let_in("ab"))
            signal.raise_signal(signal.SIGINT)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["a", "b", "whole"]


def test_the_way_out_is_not_interrupted_by_a_second_signal():
    done: list[object] = []

    def items():
        try:
            signal.raise_signal(signal.SIGTERM)
            yield 0
        finally:
            signal.raise_signal(signal.SIGTERM)
            done.append("left")

    with pytest.raises(SystemExit) as caught, ended_by_sigterm(done), signals_held() as signals:
        list(signals.let_in(items()))
    assert caught.value.code == 128 + signal.SIGTERM
    assert done == ["left", "SIGTERM"]


def test_each_that_was_held_acts():
    done: list[object] = []

    def work():
        with signals_held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt), ended_by_sigterm(done):
        work()
    assert done == ["whole", "SIGTERM"]


def test_the_third_signal_acts_at_once():
    def hold_on():
        with signals_held():
            for _ in range(9):
                signal.raise_signal(signal.SIGTERM)

    done: list[object] = []
    with pytest.raises(SystemExit), ended_by_sigterm(done):
        hold_on()
    assert done == ["SIGTERM"] * 2
