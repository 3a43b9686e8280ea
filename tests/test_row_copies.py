"""Copies by one thread and by several: the same bytes, all of them before the call returns."""

import threading

import numpy as np
import pytest

from engine import row_copies
from engine.row_copies import RowCopies


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
    if copies._num_threads == 1 and not fails_on_caller:
        copies.copy(pixels, pixels)
        return
    with pytest.raises(ValueError, match="no such page"):
        copies.copy(pixels, pixels)
    is_over = True
    assert not any(late)
    assert len(late) == (0 if copies._num_threads == 1 else copies._num_threads - 1 if fails_on_caller else 1)
