"""The memory budget: threads together stay within it, and are served in the order of their requests."""

import os
import signal
import threading

import pytest

from loopfeed.preprocess.decoding.memory_budget import MemoryBudget
from tests.waiting import wait_until

TIMEOUT_S = 60.0


def budget_of(num_bytes, free_bytes=0, *, timeout_s=TIMEOUT_S):
    return MemoryBudget(num_bytes, free_bytes, timeout_s=timeout_s)


def start(function, *arguments):
    # A daemon: one that waits without end must not keep the tests from ending.
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("num_bytes", [1, 40, 50, 99, 100, 1000])
def test_reservations_never_exceed_the_budget(num_bytes):
    budget = budget_of(100)
    lock, held, most = threading.Lock(), [0], []

    def work():
        for _ in range(50):
            with budget.held(num_bytes):
                with lock:
                    held[0] += 1
                    most.append(held[0])
                with lock:
                    held[0] -= 1

    threads = [start(work) for _ in range(6)]
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(most) == 300
    assert max(most) <= max(1, 100 // num_bytes)


def test_a_large_reservation_does_not_wait_for_ever():
    budget = budget_of(100)
    order, waiting = [], []

    def ask(name, num_bytes):
        with budget.held(num_bytes):
            order.append(name)

    with budget.held(60):
        for name, num_bytes in (("large", 100), ("small", 10)):
            waiting.append(start(ask, name, num_bytes))
            wait_until(lambda: len(budget._waiting) == len(waiting))
        assert order == []
    for thread in waiting:
        thread.join(TIMEOUT_S)
    assert order == ["large", "small"]


@pytest.mark.timeout(60)
def test_an_interrupted_wait_blocks_nobody():
    budget = budget_of(100)

    def interrupt():
        wait_until(lambda: budget._waiting)
        os.kill(os.getpid(), signal.SIGINT)

    with budget.held(60):
        interrupter = start(interrupt)
        with pytest.raises(KeyboardInterrupt), budget.held(100):
            pass
        interrupter.join(TIMEOUT_S)
        with budget.held(40):
            pass


@pytest.mark.timeout(60)
def test_the_time_limit_of_a_wait_restarts_at_every_release(monkeypatch):
    budget = budget_of(100, timeout_s=1.0)
    limits, wait = [], budget._changed.wait

    def noting(timeout):
        limits.append(timeout)
        return wait(TIMEOUT_S)

    monkeypatch.setattr(budget._changed, "wait", noting)
    done = threading.Event()

    def ask():
        with budget.held(100):
            done.set()

    with budget.held(50):
        with budget.held(50):
            start(ask)
            wait_until(lambda: budget._waiting)
        wait_until(lambda: len(limits) == 2)
    assert done.wait(TIMEOUT_S)
    assert limits == [1.0, 1.0]


def test_an_error_releases_its_reservation():
    budget = budget_of(100)
    with pytest.raises(KeyError), budget.held(100):
        raise KeyError
    with budget.held(100):
        pass
