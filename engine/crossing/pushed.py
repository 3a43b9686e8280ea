"""Records that the program emits: losses, evaluation counts, snapshots of its state, histograms and images."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


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
            the last two are None if the labels are not class numbers, and `top5` also if the network has fewer than six
            classes.
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


def mean_of_images(total: float | None, num_images: int) -> float:
    """Return a sum over images divided by their number; NaN if there is none of either."""
    return math.nan if total is None or num_images == 0 else total / num_images


class PushedSnapshot(NamedTuple):
    """A snapshot of the program's state.

    Attributes:
        step: updates done.
        batch_index: batches taken.
        state: the loop's state as a pytree of NumPy arrays, copied to the host; PRNG keys as their uint32 data.
    """

    step: int
    batch_index: int
    state: Any


class Histogram(NamedTuple):
    """The distribution of the finite elements of one array.

    Attributes:
        edges: float32 [65], the limits of 64 buckets of equal width, from the smallest to the largest element.
        counts: int32 [64], elements of each bucket: from its left edge up to its right edge, which counts only in the
            last one.
        mean, std: mean and standard deviation, computed in float32.
        num_nonfinite: number of other elements, which are NaN or infinite.
    """

    edges: NDArray[np.float32]
    counts: NDArray[np.int32]
    mean: float
    std: float
    num_nonfinite: int


class PushedHistograms(NamedTuple):
    """The distributions of weights and gradients.

    Attributes:
        step: updates done, including the one with these gradients.
        time: arrival at the host, in seconds since the Unix epoch.
        histograms: by name, such as "weights/conv1.kernel" and "gradients/conv1.kernel". Weights are those after the
            update. Gradients are averaged over the whole update, before they are clipped; frozen parameters have none.
    """

    step: int
    time: float
    histograms: dict[str, Histogram]


class PushedImages(NamedTuple):
    """The first images of a batch, as the network saw them, after augmentation and mixing.

    Attributes:
        step: updates done, including the one with this batch, which is the last of the update.
        time: arrival at the host, in seconds since the Unix epoch.
        images: uint8 [k, h, w, 3], RGB.
        labels: int32 [k], class numbers, or None if labels have another form.
        mix_weights: float64 [k], the share of each image's own label if images were mixed in pairs (0 and 1, 2 and 3,
            …), else None.
    """

    step: int
    time: float
    images: NDArray[np.uint8]
    labels: NDArray[np.int32] | None
    mix_weights: NDArray[np.float64] | None


type Pushed = PushedLosses | PushedEvaluation | PushedSnapshot | PushedHistograms | PushedImages
