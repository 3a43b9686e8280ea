"""Pulls from Loopfeed's infeed, in an otherwise empty loop.

The feeder's source provides every batch immediately, so the measurement is of the crossing: the call, the hand-over
between the ring's threads, and the copy into the program's buffer. An element of each batch is used, so that the
compiler cannot remove the pull.
"""

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from gated_training import ReadyBatches
from jax import lax
from protocol import Channel, jax_versions, timed

from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.crossing.choice import choose_transport
from loopfeed.engine.crossing.infeed import Batch, Infeed
from loopfeed.engine.crossing.token import first_token
from loopfeed.engine.feed.feeder import Feeder, ring_depth

READER_THREADS = 2  # as TrainConfig has it
LAST_STEP = 2**31 - 1


def start_infeed(transport_name: Any, batch: int, size: int) -> Infeed:
    """Return an infeed whose batches are always ready."""
    source, board = ReadyBatches(batch, size), ControlBoard()
    feeder = Feeder(
        source,
        start_index=0,
        stop_index=LAST_STEP,
        depth=ring_depth(source, None),
        num_threads=READER_THREADS,
        timeout_s=600,
    )
    infeed = Infeed(feeder, board, choose_transport(transport_name, jax.default_backend()), words_of=board.words)
    infeed.start()
    return infeed


def main(transport_name: str, batch: int, size: int, unit: str) -> None:
    """Serve pulls, or the bytes of their pixels."""
    channel, infeed = Channel(), start_infeed(transport_name, batch, size)

    @partial(jax.jit, donate_argnums=0)
    def loop(start: tuple[jax.Array, jax.Array], count: jax.Array) -> tuple[jax.Array, jax.Array]:
        stop = start[0] + count

        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            step, total = carry
            _, pulled = infeed.pull(first_token(), step, jnp.int32(0), jnp.int32(1))
            assert isinstance(pulled.batches, Batch)
            used = sum(array.reshape(-1)[-1].astype(jnp.uint32) for array in (*pulled.batches[:2], pulled.control.stop))
            return step + 1, total + used

        return lax.while_loop(lambda carry: carry[0] < stop, body, start)

    state = jnp.int32(0), jnp.uint32(0)

    def work(num_units: int) -> None:
        nonlocal state
        state = jax.block_until_ready(loop(state, jnp.int32(num_units)))

    run = timed(work)

    def run_and_forget(num_units: int) -> float:
        start = int(state[0])
        seconds = run(num_units)
        # Discard the times that the pulls waited, as the loss stream does in a run.
        for step in range(start, start + num_units):
            infeed.take_wait_s(step)
        return seconds

    run_and_forget(8)
    channel.ready(batch * size * size * 4 if unit == "bytes" else 1, versions=jax_versions())
    channel.serve(run_and_forget)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
