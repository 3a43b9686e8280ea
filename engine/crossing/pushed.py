"""Records that the program emits: losses, evaluation counts, and snapshots of its state."""

from typing import Any, NamedTuple


class PushedLosses(NamedTuple):
    """Losses of one or more consecutive updates.

    Attributes:
        first_step: number of the first of these updates, from 1.
        losses: means over the batch, as the program computed them in float32; empty if no update was due.
        learning_rates: learning rates of these updates.
        time: arrival at the host, in seconds since the Unix epoch.
        metrics: values of each metric in these updates, by name.
    """

    first_step: int
    losses: list[float]
    learning_rates: list[float]
    time: float
    metrics: dict[str, list[float]] | None = None


class PushedEvaluation(NamedTuple):
    """The result of one evaluation.

    Attributes:
        step: updates done before the evaluation.
        num_images, top1, top5: number of images, and how many are correct in the top class and in the top five classes;
            the last two are None if the labels are not class numbers.
        loss: mean over the images.
        time: arrival at the host, in seconds since the Unix epoch.
        metrics: values of the metrics by name, numbers or nested lists of numbers.
    """

    step: int
    num_images: int
    top1: int | None
    top5: int | None
    loss: float
    time: float
    metrics: dict[str, Any] | None = None


class PushedSnapshot(NamedTuple):
    """A snapshot of the program's state.

    Attributes:
        step: updates done.
        pulls: batches taken.
        state: the loop's state as a pytree of NumPy arrays, copied to the host; PRNG keys as their uint32 data.
    """

    step: int
    pulls: int
    state: Any


type Pushed = PushedLosses | PushedEvaluation | PushedSnapshot
