"""The infeed: the crossing by which the program pulls its batches and the control word.

A pull is addressed by (batch index, shard) and takes the batches from there on, one or a chunk of them. Where the host
fails, the exception is kept here, the pull answers with the batches that came before, and the stop bit set; the loop
ends after these, and the host then raises what was kept.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from engine.control.board import ControlBoard
from engine.control.word import CONTROL_WORDS, STOP, ControlWord, ControlWords, decode_control, stop_at_once
from engine.crossing.transport import Array, Transport
from engine.feed.batches import Labels, Pixels
from engine.feed.feeder import Feeder
from engine.images.unpack import pack_dense


class Batch(NamedTuple):
    """One batch on the device.

    Attributes:
        pixels: uint32 [b, H, W], packed.
        labels: int32 [b].
    """

    pixels: jax.Array
    labels: jax.Array


class Pulled(NamedTuple):
    """What one pull gives the program.

    Attributes:
        control: what the host asks for, and how many batches there are, up to n.
        batches: uint32 [n, b, H, words of a row], b the shard's part of a batch, and int32 [n, b]; what is behind those
            that there are is nothing, and where there is none all are zeros. None: they come one by one.
    """

    control: ControlWord
    batches: Batch | None


type WordsOf = Callable[[int, int], ControlWords]
"""(index of the first batch, batches wanted) → the control words of that pull."""


class BatchInfeed(Protocol):
    """What the program asks of an infeed.

    Attributes:
        chunk: batches a pull, n.
        num_together: batches of a pull whose losses are emitted together.
        failure: the exception that ended the infeed, None while there is none.
    """

    chunk: int
    num_together: int
    failure: BaseException | None

    def pull(self, batch_index: jax.Array, shard: jax.Array, num_batches: jax.Array) -> Pulled:
        """Pulls batches for a shard; called while tracing.

        Args:
            batch_index: int32 [], of the first (from 0).
            shard: int32 [].
            num_batches: int32 [], how many are wanted, at most n.
        """
        ...

    def for_each[C](
        self,
        pulled: Pulled,
        take_in: Callable[[C, Batch], C],
        carry: C,
        *,
        is_over: Callable[[C], jax.Array] = lambda _: jnp.zeros((), jnp.bool),
        emit: Callable[[C], C] = lambda carry: carry,
    ) -> tuple[C, jax.Array]:
        """Takes in the batches of a pull, in order; called while tracing.

        Args:
            pulled: what `pull` gave.
            take_in: (carry, batch) → carry.
            carry: before the first, a pytree of arrays.
            is_over: carry → bool [], whether to leave the rest.
            emit: carry → carry, emits what no more than `num_together` batches came to.

        Returns:
            The carry after the last, and how many were taken in (int32 []): fewer than `pulled` says, where it was over
            or the host had no more after all.
        """
        ...

    def take_wait_s(self, batch_index: int) -> float:
        """Gives the seconds that the program waited for a batch, once, when it was trained on."""
        ...

    def start(self) -> None:
        """Begins to read ahead; called once, inside the transport's `running`."""
        ...

    def close(self) -> None:
        """Stops that; may be called again."""
        ...


class Infeed:
    """Connects a feeder and a control board to the program: a `BatchInfeed` whose batches come with the pull.

    Args:
        feeder: where the batches are, not started.
        board: asked whether the run is to stop.
        transport: how the call is made.
        words_of: gives the control words of a pull.
        chunk: batches a pull, n.
        times_waits: whether `take_wait_s` is asked for every batch; waits that nobody asks for would pile up.

    Attributes:
        chunk, num_together, failure: see `BatchInfeed`.
    """

    def __init__(
        self,
        feeder: Feeder,
        board: ControlBoard,
        transport: Transport,
        *,
        words_of: WordsOf,
        chunk: int = 1,
        times_waits: bool = True,
    ) -> None:
        self._times_waits = times_waits
        self._feeder, self._board, self._transport, self._words_of = feeder, board, transport, words_of
        self.chunk = self.num_together = chunk
        self._results = (
            jax.ShapeDtypeStruct((chunk, *feeder.shard_shape), jnp.uint32),
            jax.ShapeDtypeStruct((chunk, feeder.shard_batch), jnp.int32),
            jax.ShapeDtypeStruct((CONTROL_WORDS,), jnp.uint32),
        )
        self._wait_s: dict[int, float] = {}
        self.failure: BaseException | None = None

    def start(self) -> None:
        """See `BatchInfeed.start`."""
        self._feeder.start()

    def close(self) -> None:
        """See `BatchInfeed.close`."""
        self._feeder.close()

    def pull(self, batch_index: jax.Array, shard: jax.Array, num_batches: jax.Array) -> Pulled:
        """See `BatchInfeed.pull`."""
        address = jnp.stack([batch_index, shard, num_batches])
        pixels, labels, words = self._transport.call(self._answer, self._results, address)
        return Pulled(decode_control(words), Batch(pixels, labels))

    def for_each[C](
        self,
        pulled: Pulled,
        take_in: Callable[[C, Batch], C],
        carry: C,
        *,
        is_over: Callable[[C], jax.Array] = lambda _: jnp.zeros((), jnp.bool),
        emit: Callable[[C], C] = lambda carry: carry,
    ) -> tuple[C, jax.Array]:
        """See `BatchInfeed.for_each`.

        A stop that comes in the place of batches makes it a loop of no turn, which changes the carry where it lies:
        `lax.cond` copies it, which took a step of ResNet-50 102 MB, and one of a small perceptron a fifth of its time.
        """
        batches = pulled.batches
        assert batches is not None

        def goes_on(turns: tuple[C, jax.Array]) -> jax.Array:
            carry, num_taken = turns
            return (num_taken < pulled.control.num_batches) & ~is_over(carry)

        def turn(turns: tuple[C, jax.Array]) -> tuple[C, jax.Array]:
            carry, num_taken = turns
            return take_in(carry, self._batch(batches, num_taken)), num_taken + 1

        carry, num_taken = lax.while_loop(goes_on, turn, (carry, jnp.zeros((), jnp.int32)))
        return emit(carry), num_taken

    def _batch(self, batches: Batch, number: jax.Array) -> Batch:
        """Takes one of several batches, by int32 [] `number` (from 0)."""
        pixels, labels = (lax.dynamic_index_in_dim(each, number, keepdims=False) for each in batches)
        return make_batch(self._feeder, pixels, labels)

    def take_wait_s(self, batch_index: int) -> float:
        """See `BatchInfeed.take_wait_s`: the pull of that batch waited so long."""
        return self._wait_s.pop(batch_index, 0.0)

    def _answer(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        """The host's side of a pull; runs on a thread of the runtime."""
        batch_index, shard, num_wanted = operands[0].tolist()
        pixels, labels, words = results
        num_taken = 0
        try:
            asked = self._words_of(batch_index, num_wanted)
            words[...] = asked
            num_batches = asked[2]
            while num_taken < num_batches and not (num_taken and self._board.is_stop_requested()):
                if not self._take(batch_index + num_taken, shard, pixels[num_taken], labels[num_taken]):
                    break
                num_taken += 1
            if num_taken < num_batches:
                _end_with(num_taken, words)
        except BaseException as error:  # noqa: BLE001 - raising through XLA loses it: kept, and raised by the host
            self.failure = error
            _end_with(num_taken, words)
        if num_taken == 0:
            pixels[...], labels[...] = 0, 0
        if self.failure is not None:
            # The traceback keeps the frames: none may hold the program's memory.
            traceback.clear_frames(self.failure.__traceback__)
            del operands, results, pixels, labels, words

    def _take(self, batch_index: int, shard: int, pixels: Pixels, labels: Labels) -> bool:
        """Takes a batch; False where a stop came before it, which takes none: it stays for whoever continues there."""
        waited_s = self._feeder.take(batch_index, shard, pixels, labels, is_cancelled=self._board.is_stop_requested)
        if waited_s is None:
            return False
        if waited_s and self._times_waits:
            self._wait_s[batch_index] = waited_s
        return True


def make_batch(feeder: Feeder, pixels: jax.Array, labels: jax.Array) -> Batch:
    """Gives a batch, whose pixels uint32 [b, H, words of a row] are as the feeder has them, in the packed layout."""
    return Batch(pack_dense(pixels) if feeder.is_dense else pixels, labels)


def _end_with(num_batches: int, words: NDArray[np.uint32]) -> None:
    """Makes the control words of a pull those of a stop after so many batches; without any they say nothing else."""
    words[...] = (words[0] | STOP, words[1], num_batches) if num_batches else stop_at_once()
