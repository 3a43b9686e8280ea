"""The infeed: batches by address, stops, and failures answered with zeros."""

import threading
import time
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.control.request import ControlRequest
from loopfeed.engine.crossing.infeed import Infeed
from loopfeed.engine.crossing.token import first_token
from loopfeed.engine.crossing.transport import InplaceTransport
from loopfeed.engine.feed.batches import FunctionBatches
from loopfeed.engine.feed.feeder import Feeder
from loopfeed.engine.program.pulls import for_each
from tests.toy import BATCH, SIZE, CountedBatches, toy_batch


def make_infeed(batches, *, stop_step=4, num_shards=1, timeout_s=5.0, chunk=1, times_waits=True):
    feeder = Feeder(
        FunctionBatches(batches),
        start_index=0,
        stop_index=stop_step,
        depth=2,
        num_threads=1,
        timeout_s=timeout_s,
        num_shards=num_shards,
    )
    feeder.start()
    board = ControlBoard()
    infeed = Infeed(feeder, board, InplaceTransport(), words_of=board.words, chunk=chunk, times_waits=times_waits)
    none = jnp.int32(0)
    pull = jax.jit(infeed.pull).lower(first_token(), none, none, none).compile()

    def pull_chunk(step, shard=0, num_batches=chunk):
        return pull(first_token(), jnp.int32(step), jnp.int32(shard), jnp.int32(num_batches))[1]

    return infeed, feeder, board, pull_chunk


def test_a_pull_returns_the_batch_of_its_step_and_a_neutral_control_word():
    infeed, feeder, _, pull = make_infeed(toy_batch)
    for step in range(4):
        pulled = pull(step)
        pixels, labels = toy_batch(step)
        assert np.array_equal(pulled.batches.pixels, pixels[None])
        assert np.array_equal(pulled.batches.labels, labels[None])
        assert not pulled.control.stop
        assert pulled.control.learning_rate_factor == 1
        assert infeed.take_wait_s(step) >= 0
    feeder.close()


@pytest.mark.timeout(60)
def test_the_wait_for_a_late_batch_is_reported_once():
    pulling = threading.Event()

    def late(step):
        if step == 1:
            assert pulling.wait(30)
            time.sleep(0.5)
        return toy_batch(step)

    infeed, feeder, _, pull = make_infeed(late)
    pull(0)
    threading.Timer(0.1, pulling.set).start()
    pull(1)
    # Of 0.5 s and more; the rest is for a machine that is slow to begin the pull.
    assert infeed.take_wait_s(1) >= 0.2
    assert infeed.take_wait_s(1) == 0
    feeder.close()


def test_a_stop_request_takes_no_batch():
    infeed, feeder, board, pull = make_infeed(toy_batch)
    pull(0)
    board.request_stop("a test")
    pulled = pull(1)
    assert pulled.control.stop
    assert not pulled.batches.pixels.any()
    assert infeed.failure is None
    pixels, labels = np.empty((BATCH, SIZE, SIZE), np.uint32), np.empty(BATCH, np.int32)
    feeder.take(1, 0, pixels, labels)  # it is still there
    assert np.array_equal(pixels, toy_batch(1)[0])
    feeder.close()


def stalling_at(stalled, released):
    """Toy batches of which one does not come until it is released."""

    def batches(step):
        if step == stalled:
            released.wait(30)
        return toy_batch(step)

    return batches


@pytest.mark.timeout(60)
def test_a_stop_request_ends_the_wait_for_a_batch_that_does_not_come():
    released = threading.Event()
    infeed, feeder, board, pull = make_infeed(stalling_at(1, released), timeout_s=30)
    pull(0)
    threading.Timer(0.2, board.request_stop, ["a test"]).start()
    started = time.monotonic()
    pulled = pull(1)
    assert time.monotonic() - started < 20  # neither the source's 30 s nor the infeed's
    assert pulled.control.stop
    assert not pulled.batches.pixels.any()
    assert infeed.failure is None
    released.set()
    feeder.close()


def test_a_failure_is_kept_and_answered_with_zeros_and_a_stop():
    infeed, feeder, _, pull = make_infeed(CountedBatches(raise_at=1))
    assert not pull(0).control.stop
    pulled = pull(1)
    assert pulled.control.stop
    assert not pulled.batches.pixels.any()
    assert not pulled.batches.labels.any()
    assert isinstance(infeed.failure, ConnectionResetError)
    feeder.close()


def assert_holds(pulled, steps, *, stop):
    """Assert that the pull returned these batches."""
    assert pulled.control.num_batches == len(steps)
    assert bool(pulled.control.stop) is stop
    for number, step in enumerate(steps):
        assert np.array_equal(pulled.batches.pixels[number], toy_batch(step)[0])
        assert np.array_equal(pulled.batches.labels[number], toy_batch(step)[1])


@pytest.mark.parametrize("over_at", [1, 2, 99])
def test_the_batches_of_a_chunk_are_taken_in_in_order_until_it_is_over(over_at):
    infeed, feeder, _, pull = make_infeed(toy_batch, chunk=3)
    pulled = pull(0)
    emitted = []

    def take_in(seen, batch):
        count, pixels, labels = seen
        return count + 1, pixels.at[count].set(batch.pixels), labels.at[count].set(batch.labels)

    def emit(token, seen):
        emitted.append(seen)
        return token, seen

    def take_all(pulled):
        nothing = jnp.int32(0), jnp.zeros((3, BATCH, SIZE, SIZE), jnp.uint32), jnp.zeros((3, BATCH), jnp.int32)
        over: Any = {"is_over": lambda seen: seen[0] >= over_at, "emit": emit}
        return for_each(infeed, first_token(), pulled, take_in, nothing, **over)[1:]

    (count, pixels, labels), num_taken = jax.jit(take_all)(pulled)
    assert count == num_taken == min(over_at, 3)
    for step in range(num_taken):
        assert np.array_equal(pixels[step], toy_batch(step)[0])
        assert np.array_equal(labels[step], toy_batch(step)[1])
    assert not pixels[num_taken:].any()
    assert len(emitted) == 1
    feeder.close()


@pytest.mark.timeout(60)
def test_a_stop_request_in_the_midst_of_a_chunk_keeps_the_batches_before_it_and_what_came_with_them():
    released = threading.Event()
    infeed, feeder, board, pull = make_infeed(stalling_at(2, released), timeout_s=30, chunk=4)
    board.request(ControlRequest(learning_rate_factor=0.5))
    threading.Timer(0.2, board.request_stop, ["a test"]).start()
    pulled = pull(0)
    assert_holds(pulled, [0, 1], stop=True)
    assert pulled.control.learning_rate_factor == 0.5
    assert infeed.failure is None
    released.set()
    feeder.close()


@pytest.mark.timeout(60)
def test_a_stop_is_seen_between_the_batches_of_a_chunk_though_none_is_long_in_coming():
    def asking(step):
        if step == 3:
            board.request_stop("a test")
        time.sleep(0.05)
        return toy_batch(step)

    _, feeder, board, pull = make_infeed(asking, stop_step=64, chunk=64)
    pulled = pull(0)
    assert pulled.control.stop
    assert 1 <= pulled.control.num_batches <= 4
    feeder.close()


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_failure_keeps_no_memory_of_the_program_alive(num_before):
    infeed, feeder, _, _ = make_infeed(CountedBatches(raise_at=1), chunk=2)
    pixels, labels = feeder.shard_shapes()
    results = [np.ones((2, *pixels), np.uint32), np.ones((2, *labels), np.int32), np.ones(3, np.uint32)]
    memory = [weakref.ref(array) for array in results]
    infeed._answer([np.array([1 - num_before, 0, 2], np.int32)], results)
    assert isinstance(infeed.failure, ConnectionResetError)
    del results
    assert [reference() for reference in memory] == [None, None, None]
    feeder.close()


def test_unread_wait_times_do_not_accumulate():
    def late(step):
        time.sleep(0.02)
        return toy_batch(step)

    waits = []
    for times_waits in (True, False):
        infeed, feeder, _, pull = make_infeed(late, times_waits=times_waits)
        for step in range(4):
            jax.block_until_ready(pull(step))
        waits.append(infeed._wait_s)
        feeder.close()
    assert waits[0]
    assert waits[1] == {}
