"""The outfeed: the crossing by which the program emits losses, the counts of evaluations, and snapshots of its state.

Knows nothing of terminals and files: it hands each record to a receiver that must not block for long. Where that
fails, the exception is kept and the board is asked to stop the run.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from engine.control import ControlBoard
from engine.keys import plain_keys
from engine.tally import Tally
from engine.transport import Array, Transport


class PushedLosses(NamedTuple):
    """What the program emits for one update, or for several in a row.

    Attributes:
        first_step: updates done with the first of them, from 1.
        losses: means over the batch, as the program computed them in float32; none where no update was due.
        learning_rates: of these updates.
        time: seconds since the epoch at which they reached the host.
    """

    first_step: int
    losses: list[float]
    learning_rates: list[float]
    time: float


class PushedEvaluation(NamedTuple):
    """What the program emits for one evaluation.

    Attributes:
        step: updates done before it.
        num_images, top1, top5: images counted, and those right in the first place and among the first five.
        loss: mean over the images.
        time: seconds since the epoch at which it reached the host.
    """

    step: int
    num_images: int
    top1: int
    top5: int
    loss: float
    time: float


class PushedSnapshot(NamedTuple):
    """What the program emits of its state.

    Attributes:
        step: updates done.
        pulls: batches taken.
        state: the loop's state as a pytree of NumPy arrays of the host's own; of a generator's key its numbers.
    """

    step: int
    pulls: int
    state: Any


type Pushed = PushedLosses | PushedEvaluation | PushedSnapshot


class Outfeed:
    """Connects the program to a receiver of what it emits.

    Args:
        receive: called with each record, in the order of the program, on a thread of the runtime.
        board: asked to stop the run where `receive` raises.
        transport: how the call is made.

    Attributes:
        failure: the exception that `receive` raised first, None while there is none.
    """

    def __init__(self, receive: Callable[[Pushed], None], board: ControlBoard, transport: Transport) -> None:
        self._receive, self._board, self._transport = receive, board, transport
        self.failure: BaseException | None = None

    def push_losses(self, step: jax.Array, num_updates: jax.Array, numbers: jax.Array) -> None:
        """Emits the losses of the last updates; called while tracing.

        Args:
            step: int32 [], updates done with the last of them.
            num_updates: int32 [], how many they are, at most n.
            numbers: float32 [n, 2], of each its loss and its learning rate.
        """

        def read(counts: Array, numbers: Array) -> PushedLosses:
            step, num_updates = counts.tolist()
            losses, learning_rates = numbers[:num_updates].T.tolist()
            return PushedLosses(step - num_updates + 1, losses, learning_rates, time.time())

        self._push(read, jnp.stack([step, num_updates]), numbers)

    def push_evaluation(self, step: jax.Array, tally: Tally) -> None:
        """Emits the whole `tally` of an evaluation after int32 [] `step` updates; called while tracing."""

        def read(step: Array, num_images: Array, top1: Array, top5: Array, loss_sum: Array) -> PushedEvaluation:
            mean = float(loss_sum) / max(int(num_images), 1)
            return PushedEvaluation(int(step), int(num_images), int(top1), int(top5), mean, time.time())

        self._push(read, step, tally.num_images, tally.top1, tally.top5, tally.loss_sum)

    def push_snapshot(self, step: jax.Array, pulls: jax.Array, state: Any) -> None:
        """Emits the `state`, any pytree, after int32 [] `step` updates of `pulls` batches; called while tracing."""
        leaves, structure = jax.tree.flatten(plain_keys(state))

        def read(step: Array, pulls: Array, *leaves: Array) -> PushedSnapshot:
            # The operands are the program's own memory, which goes on to its next step once this returns.
            copies = [np.array(leaf) for leaf in leaves]
            return PushedSnapshot(int(step), int(pulls), jax.tree.unflatten(structure, copies))

        self._push(read, step, pulls, *leaves)

    def _push(self, read: Callable[..., Pushed], *operands: jax.Array) -> None:
        self._transport.emit(partial(self._accept, read), *operands)

    def _accept(self, read: Callable[..., Pushed], operands: Sequence[Array]) -> None:
        """The host's side of a push; runs on a thread of the runtime, or of the transport."""
        try:
            self._receive(read(*operands))
        except BaseException as error:  # noqa: BLE001 - raising through XLA loses it: kept, and raised by the host
            if self.failure is None:
                self.failure = error
            self._board.request_stop("the loss stream failed")
