"""What the program emits: losses, the counts of an evaluation, a snapshot of its state."""

from typing import Any, NamedTuple


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
