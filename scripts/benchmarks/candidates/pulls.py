"""Pulls from Loopfeed's infeed, or from a host function that does nothing, in an otherwise empty loop.

The feeder's source provides every batch immediately, so the measurement is of the crossing: the call, the hand-over
between the ring's threads, and the copy into the program's buffer. An element of each batch is used, so that the
compiler cannot remove the pull.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from protocol import Channel, jax_versions, timed

from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.control.word import CONTROL_WORDS
from loopfeed.engine.crossing.choice import choose_transport
from loopfeed.engine.crossing.infeed import Batch, Infeed
from loopfeed.engine.crossing.token import first_token
from loopfeed.engine.feed.batches import Labels, Pixels
from loopfeed.engine.feed.feeder import Feeder, ring_depth

READER_THREADS = 2  # as TrainConfig has it
LAST_STEP = 2**31 - 1


class ReadyBatches:
    """A source whose batches are always ready."""

    thread_safe = True

    def __init__(self, batch: int, size: int) -> None:
        self.batch, self.height, self.width = batch, size, size
        self._num_first = 2 * ring_depth(self, None)

    def fill(self, step: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Fill each buffer once and then leave it unchanged; untouched pages would all share one physical page.

        Filled with noise, because a card needs less power for zeros than for images, and so computes faster.
        """
        if step < self._num_first:
            pixels[...] = np.random.default_rng(step).integers(2**32, size=pixels.shape, dtype=np.uint32)
            labels[...] = 0


def make_pull(transport_name: Any, kind: str, batch: int, size: int) -> tuple[Callable[[jax.Array], Any], Any]:
    """Return two functions: a pull, step → (pixels, labels, control words or word), and one that discards wait times.

    The pull uses the infeed or a host function that does nothing. The other function discards the wait times of a range
    of steps (start, stop), as the loss stream does in a run.
    """
    transport = choose_transport(transport_name, jax.default_backend())
    if kind == "empty":
        shapes = (
            jax.ShapeDtypeStruct((batch, size, size), jnp.uint32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((CONTROL_WORDS,), jnp.uint32),
        )

        def call(step: jax.Array) -> Any:
            _, values = transport.call(lambda _operands, _results: None, shapes, first_token(), step, jnp.int32(0))
            return values

        return call, lambda _start, _stop: None
    board = ControlBoard()
    source = ReadyBatches(batch, size)
    feeder = Feeder(
        source,
        start_index=0,
        stop_index=LAST_STEP,
        depth=ring_depth(source, None),
        num_threads=READER_THREADS,
        timeout_s=600,
    )
    infeed = Infeed(feeder, board, transport, words_of=board.words)
    infeed.start()

    def pull(step: jax.Array) -> Any:
        _, pulled = infeed.pull(first_token(), step, jnp.int32(0), jnp.int32(1))
        assert isinstance(pulled.batches, Batch)
        return *pulled.batches, pulled.control.stop

    def forget(start: int, stop: int) -> None:
        for step in range(start, stop):
            infeed.take_wait_s(step)

    return pull, forget


def main(transport_name: str, kind: str, batch: int, size: int, unit: str) -> None:
    """Serve pulls, or the bytes of their pixels."""
    channel = Channel()
    pull, forget = make_pull(transport_name, kind, batch, size)

    @partial(jax.jit, donate_argnums=0)
    def loop(start: tuple[jax.Array, jax.Array], count: jax.Array) -> tuple[jax.Array, jax.Array]:
        stop = start[0] + count

        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            step, total = carry
            pixels, labels, words = pull(step)
            used = (
                pixels.reshape(-1)[-1]
                + labels.reshape(-1)[-1].astype(jnp.uint32)
                + words.reshape(-1)[0].astype(jnp.uint32)
            )
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
        forget(start, start + num_units)
        return seconds

    run_and_forget(8)
    channel.ready(batch * size * size * 4 if unit == "bytes" else 1, versions=jax_versions())
    channel.serve(run_and_forget)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
