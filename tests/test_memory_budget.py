"""What threads hold together stays within the budget, in the order in which they ask."""

import threading

import pytest

from preprocess.memory_budget import MemoryBudget

TIMEOUT_S = 60.0


@pytest.mark.parametrize("num_bytes", [1, 40, 50, 99, 100, 1000])
def test_no_more_is_held_at_a_time_than_there_is(num_bytes):
    budget = MemoryBudget(100, 0)
    lock, held, most = threading.Lock(), [0], []

    def work():
        for _ in range(50):
            with budget.held(num_bytes):
                with lock:
                    held[0] += 1
                    most.append(held[0])
                with lock:
                    held[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(most) == 300
    assert max(most) <= max(1, 100 // num_bytes)


def test_a_large_one_is_not_overtaken_for_ever():
    budget = MemoryBudget(100, 0)
    order, waiting = [], []

    def ask(name, num_bytes):
        with budget.held(num_bytes):
            order.append(name)

    with budget.held(60):
        for name, num_bytes in (("large", 100), ("small", 10)):
            waiting.append(threading.Thread(target=ask, args=(name, num_bytes)))
            waiting[-1].start()
            deadline = threading.Event()
            while len(budget._waiting) < len(waiting) and not deadline.wait(0.01):
                pass
        assert order == []
    for thread in waiting:
        thread.join(TIMEOUT_S)
    assert order == ["large", "small"]


def test_what_is_small_does_not_wait():
    budget = MemoryBudget(100, 10)
    with budget.held(1000), budget.held(10), budget.held(0):
        pass


def test_an_error_gives_back_what_was_held():
    budget = MemoryBudget(100, 0)
    with pytest.raises(KeyError), budget.held(100):
        raise KeyError
    with budget.held(100):
        pass
