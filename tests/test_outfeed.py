"""The outfeed: each loss once and in order, and a receiver that fails."""

import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.crossing.outfeed import Outfeed
from loopfeed.engine.crossing.token import first_token
from loopfeed.engine.crossing.transport import InplaceTransport


def push_steps(outfeed, steps):
    def body(carry):
        token, step = carry
        numbers = jnp.array([[1.0 / (step + 1), 0.25]], jnp.float32)
        return outfeed.push_losses(token, step + 1, jnp.int32(1), numbers), step + 1

    before = first_token(), jnp.int32(0)
    jax.block_until_ready(jax.jit(lambda: lax.while_loop(lambda carry: carry[1] < steps, body, before))())


def test_each_loss_arrives_once_in_order_with_its_time():
    received: list[Any] = []
    board = ControlBoard()
    before = time.time()
    push_steps(Outfeed(received.append, board, InplaceTransport()), 5)
    assert [pushed.first_step for pushed in received] == [1, 2, 3, 4, 5]
    assert [pushed.losses for pushed in received[:2]] == [[1.0], [0.5]]
    assert [pushed.learning_rates for pushed in received] == [[0.25]] * 5
    assert before <= received[0].time <= received[-1].time <= time.time()
    assert board.stop_reason is None


def test_a_receiver_that_raises_stops_the_run_and_its_first_exception_is_kept():
    board = ControlBoard()

    def receive(pushed):
        raise OSError(f"no room for step {pushed.first_step}")

    outfeed = Outfeed(receive, board, InplaceTransport())
    push_steps(outfeed, 3)
    assert str(outfeed.failure) == "no room for step 1"
    assert board.stop_reason == "the loss stream failed"
