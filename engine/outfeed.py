"""The outfeed: the crossing by which the program emits the loss of each step.

Knows nothing of terminals and files: it hands each record to a receiver that must not block for long. Where that
fails, the exception is kept and the board is asked to stop the run.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from engine.control import ControlBoard
from engine.transport import Array, Transport


class PushedLoss(NamedTuple):
    """What the program emits for one update.

    Attributes:
        step: updates done, from 1.
        loss: mean over the batch, as the program computed it in float32.
        learning_rate: of this update.
        time: seconds since the epoch at which it reached the host.
    """

    step: int
    loss: float
    learning_rate: float
    time: float


class Outfeed:
    """Connects the program to a receiver of losses.

    Args:
        receive: called with each loss, in the order of the steps, on a thread of the runtime.
        board: asked to stop the run where `receive` raises.
        transport: how the call is made.

    Attributes:
        failure: the exception that `receive` raised first, None while there is none.
    """

    def __init__(self, receive: Callable[[PushedLoss], None], board: ControlBoard, transport: Transport) -> None:
        self._receive, self._board, self._transport = receive, board, transport
        self.failure: BaseException | None = None

    def push_loss(self, step: jax.Array, loss: jax.Array, learning_rate: jax.Array) -> None:
        """Emits int32 [] `step` (updates done), float32 [] `loss` and `learning_rate`; called while tracing."""
        # A call without any result is dropped by some backends; one byte keeps it.
        acknowledged = (jax.ShapeDtypeStruct((), jnp.uint8),)
        self._transport.call(self._accept, acknowledged, step, loss, learning_rate)

    def _accept(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        """The host's side of a push; runs on a thread of the runtime."""
        results[0][...] = 0
        try:
            step, loss, learning_rate = operands
            self._receive(PushedLoss(int(step), float(loss), float(learning_rate), time.time()))
        except BaseException as error:  # noqa: BLE001 - raising through XLA loses it: kept, and raised by the host
            if self.failure is None:
                self.failure = error
            self._board.request_stop("the loss stream failed")
