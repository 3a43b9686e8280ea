"""The outfeed: each loss once and in order, and a receiver that fails."""

import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from engine.control import ControlBoard
from engine.outfeed import Outfeed
from engine.transport import InplaceTransport


def push_steps(outfeed, steps):
    def body(step):
        outfeed.push_loss(step + 1, 1.0 / (step + 1), jnp.float32(0.25))
        return step + 1

    jax.block_until_ready(jax.jit(lambda: lax.while_loop(lambda step: step < steps, body, jnp.int32(0)))())


def test_each_loss_arrives_once_in_order_with_its_time():
    received: list[Any] = []
    board = ControlBoard()
    before = time.time()
    push_steps(Outfeed(received.append, board, InplaceTransport()), 5)
    assert [pushed.step for pushed in received] == [1, 2, 3, 4, 5]
    assert [pushed.loss for pushed in received[:2]] == [1.0, 0.5]
    assert {pushed.learning_rate for pushed in received} == {0.25}
    assert before <= received[0].time <= received[-1].time <= time.time()
    assert board.stop_reason is None


def test_a_receiver_that_raises_stops_the_run_and_its_first_exception_is_kept():
    board = ControlBoard()

    def receive(pushed):
        raise OSError(f"no room for step {pushed.step}")

    outfeed = Outfeed(receive, board, InplaceTransport())
    push_steps(outfeed, 3)
    assert str(outfeed.failure) == "no room for step 1"
    assert board.stop_reason == "the loss stream failed"
