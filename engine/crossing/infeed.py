"""The infeed, through which the program pulls batches and control words (the host's requests) from the host.

A pull is addressed by (batch index, shard) and returns one batch or a chunk of batches, beginning at that index. If the
host fails, the infeed keeps the exception, and the pull returns the batches before the failure with the stop bit set.
The loop ends after these batches, and the host then raises the exception.
"""

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.control.board import (
    CONTROL_WORDS,
    STOP,
    ControlBoard,
    ControlWord,
    ControlWords,
    decode_control,
    stop_at_once,
)
from loopfeed.engine.crossing.token import Token
from loopfeed.engine.crossing.transport import Array, Transport
from loopfeed.engine.feed.batches import Labels, Pixels
from loopfeed.engine.feed.feeder import Feeder
from loopfeed.engine.images.unpack import pack_dense


class Batch(NamedTuple):
    """One batch on the device.

    Attributes:
        pixels: uint32 [b, H, W], packed.
        labels: int32 [b], or [b, words] if they are not class numbers (`loopfeed.engine.feed.label_form`).
        extents: int32 [b], where on its canvas each picture is (`loopfeed.preprocess.extents`); None for images that
            fill their pixels.
    """

    pixels: jax.Array
    labels: jax.Array
    extents: jax.Array | None = None


class Pulled(NamedTuple):
    """The result of one pull.

    Attributes:
        control: the host's requests, and the number of batches, at most n.
        batches: pixels uint32 [n, b, H, words per row], with b the shard's part of a batch, and labels int32 [n, b] or
            [n, b, words].
            Entries after the last batch are undefined; if there is no batch, all are zeros. If the batches follow the
            pull one by one, the function that draws the next of them.
    """

    control: ControlWord
    batches: "Batch | DrawBatch"


type DrawBatch = Callable[[Token, ControlWord, jax.Array], tuple[Token, Batch, jax.Array]]
"""(token, control word of the pull, int32 [] batches drawn) → token, the next batch, bool [] whether it exists."""
type WordsOf = Callable[[int, int], ControlWords]
"""(index of the first batch, number of batches wanted) → the control words of that pull."""


class PullObserver(Protocol):
    """What may watch the pulls of an infeed's first device: on XLA's threads, in order; must return at once."""

    def pull_began(self, batch_index: int) -> None:
        """Note that the program asks for batches from this one on."""
        ...

    def pull_ended(self, num_batches: int) -> None:
        """Note that so many batches are given; 0 ends the loop."""
        ...


class BatchInfeed(Protocol):
    """The interface through which the program pulls batches.

    Attributes:
        chunk: batches per pull, n.
        num_together: number of batches whose losses are emitted together.
        failure: the exception that ended the infeed, or None.
        feeder: reads the batches.
    """

    chunk: int
    num_together: int
    failure: BaseException | None
    feeder: Feeder

    def pull(
        self,
        token: Token,
        batch_index: jax.Array,
        shard: jax.Array,
        num_batches: jax.Array,
        num_rows: int | None = None,
    ) -> tuple[Token, Pulled]:
        """Pull one shard of each of several batches; called while tracing.

        Args:
            token: the token of the crossing before; that of this one is returned.
            batch_index: int32 [], index of the first batch, from 0.
            shard: int32 [], index of the shard.
            num_batches: int32 [], number of batches wanted, at most n.
            num_rows: images of a shard of these batches; None is that of the largest batch.
        """
        ...

    def take_wait_s(self, batch_index: int) -> float:
        """Return how many seconds the program waited for a batch; call this once per batch, after training on it."""
        ...

    def start(self) -> None:
        """Start reading ahead; call this method once, inside the transport's `running`."""
        ...

    def close(self) -> None:
        """Stop reading ahead; safe to call repeatedly."""
        ...


class SharedWords:
    """Control words that several devices get for the same pull: requests take effect once, and at the same pull.

    Args:
        words_of: returns the control words of a pull.
        num_shards: how many devices ask for each pull.
    """

    def __init__(self, words_of: WordsOf, num_shards: int) -> None:
        self._words_of, self._num_shards = words_of, num_shards
        self._guard = threading.Lock()
        self._answers: dict[int, tuple[ControlWords, int]] = {}

    def __call__(self, batch_index: int, num_batches: int) -> ControlWords:
        """Return the control words of a pull; called once by each device."""
        with self._guard:
            words, num_asked = self._answers.pop(batch_index, (None, 0))
            if words is None:
                words = self._words_of(batch_index, num_batches)
            if num_asked + 1 < self._num_shards:
                self._answers[batch_index] = words, num_asked + 1
            return words


class Infeed:
    """A `BatchInfeed` that reads from a feeder and a control board; the pull itself returns the batches.

    Args:
        feeder: source of the batches, not started.
        board: reports whether a stop of the run was requested.
        transport: calls the host.
        words_of: returns the control words of a pull.
        chunk: batches per pull, n.
        num_shards: devices of this process that pull a part of each batch; all of them get the words of the first that
            asks.
        first_shard: number of the first of these devices among those of all processes.
        times_waits: whether `take_wait_s` is called for every batch; otherwise the recorded waits would accumulate.
        observer: observes the pulls of the first of these devices.

    Attributes:
        chunk, num_together, failure, feeder: see `BatchInfeed`.
    """

    def __init__(
        self,
        feeder: Feeder,
        board: ControlBoard,
        transport: Transport,
        *,
        words_of: WordsOf,
        chunk: int = 1,
        num_shards: int = 1,
        first_shard: int = 0,
        times_waits: bool = True,
        observer: PullObserver | None = None,
    ) -> None:
        self._times_waits, self._first_shard, self._observer = times_waits, first_shard, observer
        self.feeder, self._board, self._transport = feeder, board, transport
        self._words_of = words_of if num_shards == 1 else SharedWords(words_of, num_shards)
        self.chunk = self.num_together = chunk
        self._wait_s: dict[int, float] = {}
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Start reading ahead; see `BatchInfeed.start`."""
        self.feeder.start()

    def close(self) -> None:
        """Stop reading ahead; see `BatchInfeed.close`."""
        self.feeder.close()

    def pull(
        self,
        token: Token,
        batch_index: jax.Array,
        shard: jax.Array,
        num_batches: jax.Array,
        num_rows: int | None = None,
    ) -> tuple[Token, Pulled]:
        """Pull one shard of each of several batches; see `BatchInfeed.pull`."""
        address, shapes = jnp.stack([batch_index, shard, num_batches]), self.feeder.shard_shapes(num_rows)
        results = (
            jax.ShapeDtypeStruct((self.chunk, *shapes[0]), jnp.uint32),
            jax.ShapeDtypeStruct((self.chunk, *shapes[1]), jnp.int32),
            jax.ShapeDtypeStruct((CONTROL_WORDS,), jnp.uint32),
        )
        token, (pixels, labels, words) = self._transport.call(self._answer, results, token, address)
        return token, Pulled(decode_control(words), Batch(pixels, labels))

    def take_wait_s(self, batch_index: int) -> float:
        """Return how long a pull waited for this batch, in seconds; see `BatchInfeed.take_wait_s`."""
        return self._wait_s.pop(batch_index, 0.0)

    def _answer(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        """Answer a pull on the host; runs on a thread of XLA's runtime."""
        batch_index, shard, num_wanted = operands[0].tolist()
        shard -= self._first_shard
        observer = self._observer if shard == 0 else None
        pixels, labels, words = results
        num_taken = 0
        try:
            if observer is not None:
                observer.pull_began(batch_index)
            asked = self._words_of(batch_index, num_wanted)
            words[...] = asked
            num_batches = asked[2]
            while num_taken < num_batches and not (num_taken and self._board.is_stop_requested()):
                if not self._take(batch_index + num_taken, shard, pixels[num_taken], labels[num_taken]):
                    break
                num_taken += 1
            if num_taken < num_batches:
                _stop_after(num_taken, words)
        except BaseException as error:  # noqa: BLE001 - raising through XLA would lose it: kept, and raised by the host
            self._keep(error, num_taken, words)
        if num_taken == 0:
            pixels[...], labels[...] = 0, 0
        try:
            if observer is not None:
                observer.pull_ended(num_taken)
        except BaseException as error:  # noqa: BLE001 - as above
            self._keep(error, num_taken, words)
        if self.failure is not None:
            # The traceback keeps the frames alive, which must not refer to the program's memory.
            traceback.clear_frames(self.failure.__traceback__)
            del operands, results, pixels, labels, words

    def _keep(self, error: BaseException, num_taken: int, words: NDArray[np.uint32]) -> None:
        """Keep the first error, and have the program stop after the batches that it got."""
        if self.failure is None:
            self.failure = error
        _stop_after(num_taken, words)

    def _take(self, batch_index: int, shard: int, pixels: Pixels, labels: Labels) -> bool:
        """Take a batch from the feeder; return False, having taken nothing, if a stop is requested first."""
        waited_s = self.feeder.take(batch_index, shard, pixels, labels, is_cancelled=self._board.is_stop_requested)
        if waited_s is None:
            return False
        if waited_s and self._times_waits:
            # Of several devices the longest wait counts: the others wait for that one.
            self._wait_s[batch_index] = max(waited_s, self._wait_s.get(batch_index, 0.0))
        return True


def make_batch(feeder: Feeder, pixels: jax.Array, labels: jax.Array) -> Batch:
    """Build a batch from what the feeder gives: pixels, uint32 [b, H, words per row], and the words of the labels."""
    if feeder.is_dense:
        pixels = pack_dense(pixels)
    if not feeder.has_extents:
        return Batch(pixels, labels)
    if not feeder.has_weights:
        return Batch(pixels, labels[:, 1], labels[:, 0])
    return Batch(pixels, jnp.concatenate([labels[:, :1], labels[:, 2:]], axis=1), labels[:, 1])


def _stop_after(num_batches: int, words: NDArray[np.uint32]) -> None:
    """Set the control words of a pull so that the program stops after `num_batches` batches; 0 stops it at once."""
    words[...] = (words[0] | STOP, words[1], num_batches) if num_batches else stop_at_once()
