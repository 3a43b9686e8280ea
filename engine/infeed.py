"""The infeed: the crossing by which the program pulls its batches and the control word.

A pull is addressed by (step, shard) and takes the batches from that step on, one or a chunk of them. Where the host
fails, the exception is kept here, the pull answers with the batches that came before, and the stop bit set; the loop
ends after these, and the host then raises what was kept.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from engine.batches import Labels, Pixels
from engine.control import (
    CONTROL_WORDS,
    STOP,
    ControlBoard,
    ControlWord,
    ControlWords,
    decode_control,
    stop_at_once,
)
from engine.feeder import Feeder
from engine.transport import Array, Transport
from engine.unpack import pack_dense


class Pulled(NamedTuple):
    """What one pull gives the program.

    Attributes:
        pixels: uint32 [n, b, H, words of a row], of up to n batches; b is the shard's part of one.
        labels: int32 [n, b].
        control: what the host asks for, and how many batches there are; what is behind them is nothing. Where there is
            none, all are zeros.
    """

    pixels: jax.Array
    labels: jax.Array
    control: ControlWord


class Batch(NamedTuple):
    """One batch on the device.

    Attributes:
        pixels: uint32 [b, H, W], packed.
        labels: int32 [b].
    """

    pixels: jax.Array
    labels: jax.Array


class Infeed:
    """Connects a feeder and a control board to the program.

    Args:
        feeder: where the batches are.
        board: asked whether the run is to stop.
        words_of: gives the control words of a pull of batches from (step, at most so many).
        transport: how the call is made.
        height, width: of the images, in pixels.
        row_words: words of a row where the layout is dense; None: one a pixel.
        chunk: batches a pull, n.

    Attributes:
        chunk: as given.
        failure: the exception that ended the infeed, None while there is none.
    """

    def __init__(
        self,
        feeder: Feeder,
        board: ControlBoard,
        transport: Transport,
        *,
        words_of: Callable[[int, int], ControlWords],
        height: int,
        width: int,
        row_words: int | None = None,
        chunk: int = 1,
    ) -> None:
        self._is_dense = row_words not in (None, width)
        self._feeder, self._board, self._transport, self._words_of = feeder, board, transport, words_of
        self.chunk = chunk
        self._results = (
            jax.ShapeDtypeStruct((chunk, feeder.shard_batch, height, row_words or width), jnp.uint32),
            jax.ShapeDtypeStruct((chunk, feeder.shard_batch), jnp.int32),
            jax.ShapeDtypeStruct((CONTROL_WORDS,), jnp.uint32),
        )
        self._wait_s: dict[int, float] = {}
        self.failure: BaseException | None = None

    def pull(self, step: jax.Array, shard: jax.Array, num_batches: jax.Array) -> Pulled:
        """Pulls batches for a shard; called while tracing.

        Args:
            step: int32 [], of the first (from 0).
            shard: int32 [].
            num_batches: int32 [], how many are wanted, at most n.
        """
        address = jnp.stack([step, shard, num_batches])
        pixels, labels, words = self._transport.call(self._answer, self._results, address)
        return Pulled(pixels, labels, decode_control(words))

    def batch(self, pulled: Pulled, number: jax.Array) -> Batch:
        """Takes one of the batches of a pull, by int32 [] `number` (from 0)."""
        pixels = lax.dynamic_index_in_dim(pulled.pixels, number, keepdims=False)
        labels = lax.dynamic_index_in_dim(pulled.labels, number, keepdims=False)
        return Batch(pack_dense(pixels) if self._is_dense else pixels, labels)

    def take_wait_s(self, step: int) -> float:
        """Gives the seconds that the pull of `step` waited for its batch, once."""
        return self._wait_s.pop(step, 0.0)

    def _answer(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        """The host's side of a pull; runs on a thread of the runtime."""
        step, shard, num_wanted = operands[0].tolist()
        pixels, labels, words = results
        num_taken = 0
        try:
            asked = self._words_of(step, num_wanted)
            words[...] = asked
            num_batches = asked[2]
            while num_taken < num_batches and not (num_taken and self._board.is_stop_requested()):
                if not self._take(step + num_taken, shard, pixels[num_taken], labels[num_taken]):
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

    def _take(self, step: int, shard: int, pixels: Pixels, labels: Labels) -> bool:
        """Takes a batch; False where a stop came before it, which takes none: it stays for whoever continues there."""
        waited_s = self._feeder.take(step, shard, pixels, labels, is_cancelled=self._board.is_stop_requested)
        if waited_s is None:
            return False
        if waited_s:
            self._wait_s[step] = waited_s
        return True


def _end_with(num_batches: int, words: NDArray[np.uint32]) -> None:
    """Makes the control words of a pull those of a stop after so many batches; without any they say nothing else."""
    words[...] = (words[0] | STOP, words[1], num_batches) if num_batches else stop_at_once()
