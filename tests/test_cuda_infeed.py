"""The infeed of a card beside its whole runs (`test_chunks.py`): what it notes of waits, and from which thread."""

import gc
import threading
from typing import Any

import numpy as np
import pytest

from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.crossing.cuda.driver import CudaError
from loopfeed.engine.crossing.cuda.infeed import StreamedInfeed
from loopfeed.engine.crossing.cuda.ring import Stopwatch
from loopfeed.engine.feed.batches import FunctionBatches
from loopfeed.engine.feed.feeder import Feeder
from tests.fake_xla import fake_transport
from tests.toy import BATCH, SIZE, toy_batch

NUM_STEPS = 6


@pytest.fixture
def opened():
    """Yield a started infeed, its card, and XLA's memory for a batch."""
    transport, fake = fake_transport(eagerness=1.0)
    board = ControlBoard()
    infeed = StreamedInfeed(
        Feeder(
            FunctionBatches(toy_batch),
            start_index=0,
            stop_index=NUM_STEPS,
            depth=3,
            num_threads=1,
            timeout_s=20,
        ),
        board,
        transport,
        words_of=board.words,
        chunk=3,
        times_waits=True,
    )
    with transport.running():
        infeed.start()
        yield infeed, transport, fake, board
        infeed.close()


def pull(infeed, step, num_wanted=3):
    words = np.zeros(3, np.uint32)
    infeed._answer([np.array([step, 0, num_wanted], np.int32)], [words])
    return words.tolist()


def give(infeed, transport, fake):
    """One turn of a chunk; gives the pixels, the labels and whether they are there."""
    sizes = 4 * BATCH * SIZE**2, 4 * BATCH, 4
    places = [fake.new_memory(size) for size in sizes]
    stream = next(number for number, each in fake._streams.items() if each.is_prompt)
    with fake.as_xla():
        infeed._give(BATCH * SIZE**2, BATCH, stream, [], places)
    pixels, labels, is_there = (np.frombuffer(fake.peek(*each), np.uint32) for each in zip(places, sizes, strict=True))
    return pixels, labels.view(np.int32), bool(is_there[0])


@pytest.mark.timeout(60)
def test_a_chunk_has_its_batches_and_zeros_after_them(opened):
    infeed, transport, fake, _ = opened
    assert pull(infeed, 0, 2)[2] == 2
    for step in range(2):
        pixels, labels, is_there = give(infeed, transport, fake)
        assert is_there
        np.testing.assert_array_equal(pixels, toy_batch(step)[0].ravel())
        np.testing.assert_array_equal(labels, toy_batch(step)[1])
    pixels, labels, is_there = give(infeed, transport, fake)
    assert not is_there
    assert not pixels.any()
    assert not labels.any()
    assert pull(infeed, 2)[2] == 3
    assert np.array_equal(give(infeed, transport, fake)[0], toy_batch(2)[0].ravel())


@pytest.mark.timeout(60)
def test_a_stopwatch_is_not_taken_for_another_step_before_it_was_read(opened, monkeypatch):
    infeed, transport, fake, _ = opened
    pull(infeed, 0)
    give(infeed, transport, fake)
    seen = []

    def elapsed_s(*stopwatch):
        seen.append(Stopwatch(*stopwatch))
        assert not infeed._stopped
        return 0.25

    monkeypatch.setattr(transport.driver, "elapsed_s", elapsed_s)
    assert infeed.take_wait_s(0) == 0.25
    assert infeed._stopped == seen
    assert infeed.take_wait_s(0) == 0
    give(infeed, transport, fake)
    assert infeed._running == {1: seen[0]}


@pytest.mark.timeout(60)
def test_an_unreadable_wait_time_does_not_end_a_run(opened, monkeypatch):
    infeed, transport, fake, _ = opened
    pull(infeed, 0)
    give(infeed, transport, fake)

    def elapsed_s(*_):
        raise CudaError("refused", "CUDA_ERROR_NOT_READY")

    monkeypatch.setattr(transport.driver, "elapsed_s", elapsed_s)
    assert infeed.take_wait_s(0) == 0


@pytest.mark.timeout(60)
def test_steps_are_timed_on_one_thread_and_read_on_another(opened):
    infeed, transport, fake, _ = opened
    errors: list[Any] = []
    pull(infeed, 0, 3)

    def read():
        try:
            for step in range(3):
                while step not in infeed._running:
                    pass
                infeed.take_wait_s(step)
        except BaseException as error:  # noqa: BLE001 - raised by the test itself
            errors.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for _ in range(3):
        assert give(infeed, transport, fake)[2]
    reader.join(30)
    assert errors == []
    assert len(infeed._stopped) <= 3


@pytest.mark.timeout(60)
def test_page_locked_memory_is_freed_at_the_end_of_a_launch_without_garbage_collection(opened):
    infeed, transport, fake, _ = opened
    pull(infeed, 0)
    give(infeed, transport, fake)
    gc.disable()
    try:
        infeed.close()
        transport.arena._blocks.clear()
        assert [each for each in fake.left() if "pinned" in each] == []
    finally:
        gc.enable()
