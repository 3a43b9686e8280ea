"""The result of an evaluation outside a training run."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.stream.sinks import EvaluationRecord


@dataclass(frozen=True)
class ClassResult:
    """The number of images of one class, and how many of them are top-1 hits.

    Attributes:
        id, name: the identifier and the readable name of the class; both are the label's digits if the images are
            arrays.
        num_images: the number of images of the class.
        num_top1: the number of these images whose class ranks first.
    """

    id: str
    name: str
    num_images: int
    num_top1: int

    @property
    def top1(self) -> float:
        """Top-1 accuracy on the images of the class, or NaN if there are no images."""
        return self.num_top1 / self.num_images if self.num_images else math.nan


@dataclass(frozen=True)
class ImagePredictions:
    """The decisions of an evaluation image by image, in the order of the split.

    Attributes:
        labels: int32 [N], the label of each image.
        classes: int32 [N, T], the first T classes of each image, -1 if a logit is NaN.
        probabilities: float32 [N, T], their softmax probabilities.
        losses: float32 [N], the loss of each image.
    """

    labels: NDArray[np.int32]
    classes: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    losses: NDArray[np.float32]


@dataclass(frozen=True)
class EvaluationResult:
    """The accuracy, loss and timings of an evaluation.

    Attributes:
        record: the numbers, as the training loop records them; the step is 0 if the weights do not record one.
        num_top1, num_top5: the number of images whose class ranks first, or among the first five. None if the labels
            are not class numbers; `num_top5` also if the network has fewer than six classes.
        classes: the counts by label, empty unless `per_class` was set.
        data: a description of the images.
        is_mirrored: whether mirror images were evaluated too.
        compile_s: seconds to compile the program or to load it from the cache.
        from_cache: whether the program came from the cache on disk.
        evaluate_s: seconds from the launch to the end of the loop.
        wait_s: how many of these seconds the loop spent waiting for batches.
        predictions: the decision on each image, None unless `predictions` was set.
    """

    record: EvaluationRecord
    num_top1: int | None
    num_top5: int | None
    classes: tuple[ClassResult, ...]
    data: str
    is_mirrored: bool
    compile_s: float
    from_cache: bool
    evaluate_s: float
    wait_s: float
    predictions: ImagePredictions | None = None
