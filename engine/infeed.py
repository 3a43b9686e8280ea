"""The infeed: the crossing by which the program pulls its batches and the control word.

A pull is addressed by (step, shard). Where the host fails, the exception is kept here, the pull answers zeros with
the stop bit set, and the loop ends before that step; the host then raises what was kept.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from engine.control import CONTROL_WORDS, STOP, ControlBoard, ControlWord, decode_control, encode_control
from engine.feeder import Feeder
from engine.transport import Array, Transport
from engine.unpack import pack_dense


class Pulled(NamedTuple):
    """What one pull gives the program.

    Attributes:
        pixels: uint32 [b, H, W], packed; b is the shard's part of the batch.
        labels: int32 [b].
        control: what the host asks for at this step.
    """

    pixels: jax.Array
    labels: jax.Array
    control: ControlWord


class Infeed:
    """Connects a feeder and a control board to the program.

    Args:
        feeder: where the batches are.
        board: asked whether the run is to stop.
        words_of: gives a pull's control words, uint32 [2].
        transport: how the call is made.
        height, width: of the images, in pixels.
        row_words: words of a row where the layout is dense; None: one a pixel.

    Attributes:
        failure: the exception that ended the infeed, None while there is none.
    """

    def __init__(
        self,
        feeder: Feeder,
        board: ControlBoard,
        transport: Transport,
        *,
        words_of: Callable[[int], NDArray[np.uint32]],
        height: int,
        width: int,
        row_words: int | None = None,
    ) -> None:
        self._is_dense = row_words not in (None, width)
        self._feeder, self._board, self._transport, self._words_of = feeder, board, transport, words_of
        self._results = (
            jax.ShapeDtypeStruct((feeder.shard_batch, height, row_words or width), jnp.uint32),
            jax.ShapeDtypeStruct((feeder.shard_batch,), jnp.int32),
            jax.ShapeDtypeStruct((CONTROL_WORDS,), jnp.uint32),
        )
        self._wait_s: dict[int, float] = {}
        self.failure: BaseException | None = None

    def pull(self, step: jax.Array, shard: jax.Array) -> Pulled:
        """Pulls the batch at int32 [] `step` (from 0) for int32 [] `shard`; called while tracing."""
        pixels, labels, words = self._transport.call(self._answer, self._results, step, shard)
        return Pulled(pack_dense(pixels) if self._is_dense else pixels, labels, decode_control(words))

    def take_wait_s(self, step: int) -> float:
        """Gives the seconds that the pull of `step` waited for its batch, once."""
        return self._wait_s.pop(step, 0.0)

    def _answer(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        """The host's side of a pull; runs on a thread of the runtime."""
        step, shard = (int(operand) for operand in operands)
        pixels, labels, words = results
        try:
            words[...] = self._words_of(step)
            if not words[0] & STOP:
                is_stopped = self._board.is_stop_requested
                waited_s = self._feeder.take(step, shard, pixels, labels, is_cancelled=is_stopped)
                if waited_s is not None:
                    self._wait_s[step] = waited_s
                    return
                words[...] = self._board.stop_words()
            # A stop takes no batch: it stays for whoever continues at this step.
            pixels[...], labels[...] = 0, 0
        except BaseException as error:  # noqa: BLE001 - raising through XLA loses it: kept, and raised by the host
            self.failure = error
            pixels[...], labels[...] = 0, 0
            words[...] = encode_control(STOP)
            # The traceback keeps the frames: none may hold the program's memory.
            traceback.clear_frames(error.__traceback__)
            del operands, results, pixels, labels, words
