"""Copies by one thread and by several: the same bytes, all of them before the call returns."""

import threading

import numpy as np
import pytest

from loopfeed.engine.feed import row_copies
from loopfeed.engine.feed.row_copies import RowCopies
from tests.waiting import wait_until


@pytest.fixture(params=[1, 2, 3, 8])
def copies(request, monkeypatch):
    monkeypatch.setattr(row_copies, "_LEAST_PART_BYTES", 64)
    made = RowCopies(request.param)
    yield made
    made.close()
    made.close()


@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
@pytest.mark.parametrize("in_one_array", [True, False])
def test_every_row_arrives_whatever_the_number_of_threads(copies, num_rows, in_one_array):
    source = np.random.default_rng(num_rows).integers(1 << 32, size=(2 * num_rows, 3, 5), dtype=np.uint32)
    rows = source[::2] if in_one_array else list(source[::2])
    for _ in range(20):
        pixels = np.zeros((num_rows, 3, 5), np.uint32)
        copies.copy(rows, pixels)
        np.testing.assert_array_equal(pixels, source[::2])


def test_a_large_batch_is_copied_by_as_many_threads_and_a_small_one_by_the_caller(monkeypatch):
    seen = []
    monkeypatch.setattr(row_copies, "_copy", lambda _, pixels: seen.append((threading.get_ident(), len(pixels))))
    copies = RowCopies(3)
    part = np.zeros((1, row_copies._LEAST_PART_BYTES // 4), np.uint32)
    copies.copy(part, part)
    assert seen == [(threading.get_ident(), 1)]
    seen.clear()
    copies.copy(np.broadcast_to(part, (4, 1, part.size)), np.broadcast_to(part, (4, 1, part.size)))
    copies.close()
    assert sorted(num_rows for _, num_rows in seen) == [1, 1, 2]
    assert sum(ident == threading.get_ident() for ident, _ in seen) == 1


@pytest.mark.parametrize("fails_on_caller", [True, False])
def test_a_failure_is_raised_once_no_thread_writes_any_more(copies, monkeypatch, fails_on_caller):
    """The buffer is the program's own again when `copy` ends, however it ends."""
    caller, at_work = threading.get_ident(), threading.Semaphore(0)
    is_over = False
    late = []

    def copy(rows, pixels):
        if (threading.get_ident() == caller) == fails_on_caller:
            raise ValueError("no such page")
        at_work.acquire(timeout=0.05)  # nobody releases it: the failure comes first
        late.append(is_over)

    monkeypatch.setattr(row_copies, "_copy", copy)
    pixels = np.zeros((8, 4, 4), np.uint32)
    num_others = copies._num_others
    if num_others == 0 and not fails_on_caller:
        copies.copy(pixels, pixels)
        assert late == [False]
        return
    with pytest.raises(ValueError, match="no such page"):
        copies.copy(pixels, pixels)
    is_over = True
    assert not any(late)
    assert len(late) == (num_others if fails_on_caller else 1)


@pytest.mark.usefixtures("no_spare_threads")
@pytest.mark.parametrize("num_startable", [0, 1, 2])
def test_where_threads_cannot_be_started_the_others_copy_all(monkeypatch, num_startable):
    left, start = [num_startable], threading.Thread.start

    def start_or_fail(thread):
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(row_copies, "_LEAST_PART_BYTES", 64)
    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    source = np.random.default_rng(0).integers(1 << 32, size=(9, 4, 4), dtype=np.uint32)
    copies, pixels = RowCopies(4), np.zeros_like(source)
    copies.copy(source, pixels)
    copies.close()
    np.testing.assert_array_equal(pixels, source)


def test_many_callers_get_their_own_and_the_threads_end(monkeypatch):
    monkeypatch.setattr(row_copies, "_LEAST_PART_BYTES", 64)
    copies, wrong = RowCopies(3), []

    def call(seed):
        source = np.random.default_rng(seed).integers(1 << 32, size=(12, 4, 4), dtype=np.uint32)
        for _ in range(50):
            pixels = np.zeros_like(source)
            copies.copy(source, pixels)
            if not np.array_equal(pixels, source):
                wrong.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for each in callers:
        each.start()
    for each in callers:
        each.join(timeout=60)
    copies.close()
    assert wrong == []
    wait_until(lambda: not [each for each in threading.enumerate() if each.name.startswith("row-copies")])
