"""The infeed: batches by address, stops, and failures answered with zeros."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.batches import FunctionBatches
from engine.control import ControlBoard
from engine.feeder import Feeder
from engine.infeed import Infeed
from engine.transport import InplaceTransport
from tests.toy import BATCH, SIZE, CountedBatches, toy_batch


def make_infeed(batches, *, stop_step=4, num_shards=1, timeout_s=5.0):
    feeder = Feeder(
        FunctionBatches(batches),
        start_step=0,
        stop_step=stop_step,
        depth=2,
        num_threads=1,
        timeout_s=timeout_s,
        num_shards=num_shards,
    )
    feeder.start()
    board = ControlBoard()
    infeed = Infeed(feeder, board, InplaceTransport(), words_of=board.words, height=SIZE, width=SIZE)
    pull = jax.jit(infeed.pull).lower(jnp.int32(0), jnp.int32(0)).compile()
    return infeed, feeder, board, lambda step, shard=0: pull(jnp.int32(step), jnp.int32(shard))


def test_a_pull_gives_the_batch_of_its_step_and_a_quiet_control_word():
    infeed, feeder, _, pull = make_infeed(toy_batch)
    for step in range(4):
        pulled = pull(step)
        pixels, labels = toy_batch(step)
        assert np.array_equal(pulled.pixels, pixels)
        assert np.array_equal(pulled.labels, labels)
        assert not pulled.control.stop
        assert pulled.control.learning_rate_factor == 1
        assert infeed.take_wait_s(step) >= 0
    feeder.close()


@pytest.mark.timeout(60)
def test_the_wait_for_a_late_batch_is_told_once():
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


def test_shards_of_a_step_get_its_rows():
    _, feeder, _, pull = make_infeed(toy_batch, num_shards=2)
    for step in range(2):
        pixels = np.concatenate([pull(step, shard).pixels for shard in (0, 1)])
        assert np.array_equal(pixels, toy_batch(step)[0])
    feeder.close()


def test_a_stop_request_takes_no_batch():
    infeed, feeder, board, pull = make_infeed(toy_batch)
    pull(0)
    board.request_stop("a test")
    pulled = pull(1)
    assert pulled.control.stop
    assert not pulled.pixels.any()
    assert infeed.failure is None
    pixels, labels = np.empty((BATCH, SIZE, SIZE), np.uint32), np.empty(BATCH, np.int32)
    feeder.take(1, 0, pixels, labels)  # it is still there
    assert np.array_equal(pixels, toy_batch(1)[0])
    feeder.close()


@pytest.mark.timeout(60)
def test_a_stop_request_ends_the_wait_for_a_batch_that_does_not_come():
    released = threading.Event()

    def stalling(step):
        if step == 1:
            released.wait(30)
        return toy_batch(step)

    infeed, feeder, board, pull = make_infeed(stalling, timeout_s=30)
    pull(0)
    threading.Timer(0.2, board.request_stop, ["a test"]).start()
    started = time.monotonic()
    pulled = pull(1)
    assert time.monotonic() - started < 20  # neither the source's 30 s nor the infeed's
    assert pulled.control.stop
    assert not pulled.pixels.any()
    assert infeed.failure is None
    released.set()
    feeder.close()


def test_a_failure_is_kept_and_answered_with_zeros_and_a_stop():
    infeed, feeder, _, pull = make_infeed(CountedBatches(raise_at=1))
    assert not pull(0).control.stop
    pulled = pull(1)
    assert pulled.control.stop
    assert not pulled.pixels.any()
    assert not pulled.labels.any()
    assert isinstance(infeed.failure, ConnectionResetError)
    feeder.close()
