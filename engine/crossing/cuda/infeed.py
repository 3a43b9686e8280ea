"""The infeed of a program on an NVIDIA GPU, where the host runs ahead of the device.

A pull, for which the stream waits for the host, requests only the control words, once per chunk. The batches follow
one by one in a loop with a fixed number of iterations, whose kernels are all enqueued before the first is done. A flag
states for each iteration whether it has a batch; an iteration without a batch changes nothing.
"""

import math
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import jax
import jax.numpy as jnp

from loopfeed.engine.control.board import CONTROL_WORDS, ControlBoard, ControlWord, decode_control, stop_at_once
from loopfeed.engine.crossing.cuda.driver import CudaError
from loopfeed.engine.crossing.cuda.ring import DeviceRing, Places, Stopwatch
from loopfeed.engine.crossing.cuda.transport import CudaTransport
from loopfeed.engine.crossing.infeed import Batch, Pulled, PullObserver, WordsOf, make_batch
from loopfeed.engine.crossing.token import Token
from loopfeed.engine.crossing.transport import Array
from loopfeed.engine.feed.feeder import Feeder
from loopfeed.engine.scopes import DRAW, UNPACK

# A shorter wait counts as none, because even without a wait two events on a stream are not simultaneous. Not yet
# measured on a GPU.
_LEAST_WAIT_S = 20e-6


class StreamedInfeed:
    """A `BatchInfeed` that reads from a feeder and a control board; after each pull, its batches arrive one by one.

    Args:
        feeder: source of the batches, not started.
        board: reports whether a stop of the run was requested.
        transport: calls the host.
        words_of: returns the control words of a pull.
        chunk: batches per pull, n, which is also the number of iterations of the loop over them.
        times_waits: whether `take_wait_s` is called for every batch.
        observer: observes the pulls.

    Attributes:
        chunk, num_together, failure, feeder: see `BatchInfeed`.
    """

    num_together = 1

    def __init__(
        self,
        feeder: Feeder,
        board: ControlBoard,
        transport: CudaTransport,
        *,
        words_of: WordsOf,
        chunk: int,
        times_waits: bool,
        observer: PullObserver | None = None,
    ) -> None:
        self._observer = observer
        self.feeder = feeder
        self._board, self._transport, self._words_of = board, transport, words_of
        self.chunk = chunk
        self._ring = DeviceRing(transport.driver, feeder, num_bytes=4 * sum(map(math.prod, feeder.shard_shapes())))
        self._next = self._stop = feeder.start_index  # half-open range of the chunk's remaining batches
        self._times_waits = times_waits
        self._running: dict[int, Stopwatch] = {}
        self._stopped: list[Stopwatch] = []
        self._stopwatch_lock = threading.Lock()
        self._wait_s: dict[int, float] = {}
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Start reading ahead; see `BatchInfeed.start`."""
        with self._transport.driver.current():
            self.feeder.start(self._transport.arena.pinned)
            self._ring.start(self._transport.arena)

    def close(self) -> None:
        """Stop reading ahead; see `BatchInfeed.close`."""
        self._ring.close()
        self.feeder.close()
        self._read_stopwatches()

    def pull(
        self,
        token: Token,
        batch_index: jax.Array,
        shard: jax.Array,
        num_batches: jax.Array,
        num_rows: int | None = None,
    ) -> tuple[Token, Pulled]:
        """Pull only the control words of a chunk; see `BatchInfeed.pull`."""
        address = jnp.stack([batch_index, shard, num_batches])
        results = (jax.ShapeDtypeStruct((CONTROL_WORDS,), jnp.uint32),)
        token, (words,) = self._transport.call(self._answer, results, token, address)
        return token, Pulled(decode_control(words), partial(self._next_batch, self.feeder.shard_shapes(num_rows)))

    def take_wait_s(self, batch_index: int) -> float:
        """Return how long the stream waited for a batch, by the device's clock; see `BatchInfeed.take_wait_s`."""
        with self._stopwatch_lock:
            stopwatch = self._running.pop(batch_index, None)
            wait_s = self._wait_s.pop(batch_index, 0.0) if stopwatch is None else self._read(stopwatch)
        if stopwatch is not None:
            # The stopwatch has been read, so it can be reused for another batch.
            self._stopped.append(stopwatch)
        if wait_s:
            self.feeder.meter.attribute(batch_index, wait_s)
        return wait_s

    def _next_batch(
        self,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        token: Token,
        control: ControlWord,
        num_taken: jax.Array,
    ) -> tuple[Token, Batch, jax.Array]:
        """Return the next batch of the chunk, and whether it exists (bool []), after the token of this crossing.

        `shapes` are those of the pixels and labels of these batches.
        """
        dtypes = jnp.uint32, jnp.int32, jnp.uint32
        results = tuple(map(jax.ShapeDtypeStruct, (*shapes, ()), dtypes))
        give = partial(self._give, math.prod(shapes[0]), math.prod(shapes[1]))
        # The operands too keep XLA from moving the call out of the loop.
        operands = control.num_batches, num_taken
        with jax.named_scope(DRAW):
            token, (pixels, labels, exists) = self._transport.enqueue(give, results, token, *operands)
        with jax.named_scope(UNPACK):
            return token, make_batch(self.feeder, pixels, labels), exists != 0

    def _answer(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        """Answer a pull on the host."""
        batch_index, _, num_wanted = operands[0].tolist()
        words = stop_at_once()
        try:
            if self._observer is not None:
                self._observer.pull_began(batch_index)
            if self.failure is None:
                words = self._words_of(batch_index, num_wanted)
            if self._observer is not None:
                self._observer.pull_ended(words[2])
        except BaseException as error:  # noqa: BLE001 - raising through XLA would lose it: kept, and raised by the host
            self._keep(error)
            words = stop_at_once()
        self._next, self._stop = batch_index, batch_index + words[2]
        results[0][...] = words

    def _give(self, pixel_words: int, label_words: int, stream: int, _: Sequence[int], results: Sequence[int]) -> None:
        """Enqueue work that gives the program the iteration's batch, or zeros if there is none; runs on the host."""
        pixels, labels, exists = results
        batch_index, driver, is_given = self._next, self._transport.driver, False
        try:
            if batch_index < self._stop and not self._board.is_stop_requested():
                stopwatch = self._stopwatch() if self._times_waits else None
                is_given = self._ring.give(
                    batch_index,
                    Places(pixels, labels, 4 * pixel_words, 4 * label_words),
                    stream,
                    is_cancelled=self._board.is_stop_requested,
                    stopwatch=stopwatch,
                )
                if stopwatch is not None and is_given:
                    self._running[batch_index] = stopwatch
        except BaseException as error:  # noqa: BLE001 - as above
            self._keep(error)
        self._next, self._stop = (batch_index + 1, self._stop) if is_given else (batch_index, batch_index)
        driver.fill_words(exists, int(is_given), 1, stream)
        if not is_given:
            driver.fill_words(pixels, 0, pixel_words, stream)
            driver.fill_words(labels, 0, label_words, stream)

    def _keep(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error

    def _stopwatch(self) -> Stopwatch:
        try:
            return self._stopped.pop()
        except IndexError:
            arena = self._transport.arena
            return Stopwatch(arena.event(timing=True), arena.event(timing=True))

    def _read_stopwatches(self) -> None:
        """Read the remaining stopwatches while their events still exist."""
        with self._stopwatch_lock:
            for batch_index in list(self._running):
                self._wait_s[batch_index] = self._read(self._running.pop(batch_index))

    def _read(self, stopwatch: Stopwatch) -> float:
        """Return the seconds between a stopwatch's events; 0 if negligible, or if the program failed to reach them."""
        driver = self._transport.driver
        with suppress(CudaError), driver.current():
            wait_s = driver.elapsed_s(*stopwatch)
            return wait_s if wait_s >= _LEAST_WAIT_S else 0.0
        return 0.0
