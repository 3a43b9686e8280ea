"""The weights of classes in the training loss: the setting `class_weights`.

Owns what the setting means for the images that a run draws. `loopfeed.engine.objective` owns what the weights do.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.config import BALANCED, CLASS_WEIGHTS, NO_CLASS_WEIGHTS, TrainConfig
from loopfeed.engine.data.drawn_images import CLASS_WEIGHTS_DIGEST, DrawnImages, SplitLabels
from loopfeed.engine.data.weight_file import read_weight_file
from loopfeed.engine.settings import LARGEST_FLOAT32, SettingError
from loopfeed.preprocess.printable import printable

_LEAST, _MOST = 0.01, 100.0
_LEAST_FLOAT32 = 2.0**-126
_AT_ONCE = 1 << 16


class ClassWeights(NamedTuple):
    """The weights of the classes.

    Attributes:
        values: float32 [K]; None for none.
        digests: what identifies them beside settings and data, as those of `DrawnImages`.
        message: a line about them; None without any.
    """

    values: NDArray[np.float32] | None = None
    digests: dict[str, str] = {}  # noqa: RUF012 - never changed
    message: str | None = None


def choose_class_weights(
    config: TrainConfig, drawn: DrawnImages, labels: SplitLabels, num_classes: int
) -> ClassWeights:
    """Return the weights of the classes in the training loss of a run.

    Balanced weights are those of what is drawn, so that `sampling` and weights together count each class equally, not
    the rare ones twice.

    Args:
        config: the settings.
        drawn: what the run draws from the split.
        labels: the labels of the split.
        num_classes: K of the model; a class that the split does not know has the weight 1.

    Raises:
        SettingError: the setting does not fit the labels, or its file cannot be used.
    """
    if config.class_weights == NO_CLASS_WEIGHTS:
        return ClassWeights()
    classes, digests = labels.split.manifest.classes, {}
    if config.class_weights == BALANCED:
        values = _balanced(labels, _shares(drawn, labels))
    else:
        file = read_weight_file(config.class_weights, "class_weights", CLASS_WEIGHTS)
        values = np.array(file.of_classes(classes, "class_weights", labels.where), np.float64)
        _check_range(values, config.class_weights)
        digests = {CLASS_WEIGHTS_DIGEST: file.digest}
    low, high = int(values.argmin()), int(values.argmax())
    ends = [f"{values[each]:.3g} ({printable(classes[each].name)})" for each in (low, high)]
    found = f"{values[low]:.3g} for each class" if low == high else " to ".join(ends)
    message = f"class weights: {config.class_weights}: {found}"
    padded = np.ones(num_classes, np.float32)
    padded[: len(values)] = values
    return ClassWeights(padded, digests, message)


def _check_range(values: NDArray[np.float64], path: str) -> None:
    """Raise SettingError unless weights are finite in float32, and not all 0."""
    if not _LEAST_FLOAT32 <= values.max() <= LARGEST_FLOAT32:
        raise SettingError(
            "class_weights",
            "{setting}: {path} must have weights that are finite in float32 and not all 0, but the largest is "
            "{found:g}: correct the table",
            path=printable(path),
            found=values.max(),
        )


def _balanced(labels: SplitLabels, shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return balanced weights, float64 [K], for shares of the draws."""
    targets = labels.split.manifest.targets
    if targets is None:
        # scikit-learn's rule, N / (K · n); a class without images has no share in any label, and the weight 1.
        has = shares > 0
        return np.where(has, 1 / np.where(has, has.sum() * shares, 1), 1)
    if targets.kind != "classes":
        raise SettingError(
            "class_weights",
            "{setting} balanced counts the images of each class, but those of {where} have numbers, not classes: leave "
            "it out, or give a table class,weight",
            where=labels.where,
        )
    with np.errstate(divide="ignore"):
        return np.clip((1 - shares) / shares, _LEAST, _MOST)


def _shares(drawn: DrawnImages, labels: SplitLabels) -> NDArray[np.float64]:
    """Return the share of the draws that have each class, float64 [K]."""
    split, (subset, arcs) = labels.split, drawn.first
    if subset is None and arcs is None:
        return np.array(split.manifest.class_counts, np.float64) / split.num_images
    images = np.arange(split.num_images) if subset is None else subset.astype(np.int64)
    if labels.has_classes:
        classes = labels.classes_of(subset)
        if arcs is not None:
            return arcs.shares(classes, split.num_classes)
        return np.bincount(classes, minlength=split.num_classes) / len(classes)
    weights = np.full(len(images), 1 / len(images)) if arcs is None else arcs.entry_shares()
    found = np.zeros(split.num_classes)
    for start in range(0, len(images), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        found += weights[part] @ split.read_targets(images[part])
    return found
