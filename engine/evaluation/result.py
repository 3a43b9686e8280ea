"""The result of an evaluation outside a training run, and the file of its predictions."""

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.records.whole_file import write_whole
from loopfeed.engine.stream.sinks import EvaluationRecord
from loopfeed.preprocess.printable import spreadsheet_cell
from loopfeed.preprocess.system_errors import status_of

_COLUMNS = ("index", "label", "predicted", "probability", "loss")
_NAME = "name"
_SUFFIXES = (".csv", ".jsonl")


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


def mean_recall(classes: Sequence[ClassResult]) -> float | None:
    """Return the mean top-1 accuracy of the classes that have images, their balanced accuracy; None without any."""
    found = [each.top1 for each in classes if each.num_images]
    return math.fsum(found) / len(found) if found else None


@dataclass(frozen=True, repr=False)
class ImagePredictions:
    """The decisions of an evaluation image by image, in the order of the split.

    Attributes:
        labels: int32 [N], the label of each image.
        classes: int32 [N, T], the first T classes of each image, -1 if a logit is NaN.
        probabilities: float32 [N, T], their softmax probabilities.
        losses: float32 [N], the loss of each image.
        names: the name of each image in the pack (`ShardSplit.names`); None if the images have no names.
        images: int64 [N], the index of each image in the split if only a part was evaluated; None for all.
    """

    labels: NDArray[np.int32]
    classes: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    losses: NDArray[np.float32]
    names: tuple[str, ...] | None = None
    images: NDArray[np.int64] | None = None

    def __repr__(self) -> str:
        return f"ImagePredictions({len(self.labels):,} images)"

    def index_of(self, row: int) -> int:
        """Return the index in the split of the image of a row."""
        return row if self.images is None else int(self.images[row])


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

    @property
    def balanced_accuracy(self) -> float | None:
        """The mean top-1 accuracy of the classes that have images; None unless `per_class` was set."""
        return mean_recall(self.classes)


def check_prediction_file(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if a file for predictions has another suffix than .csv or .jsonl, or its folder is missing."""
    file = Path(path)
    if file.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"a file of predictions must end in {' or '.join(_SUFFIXES)}, got {path}: rename it")
    if not file.parent.is_dir() or file.is_dir():
        where = "is in a folder that does not exist" if status_of(file.parent) is None else "is below a file"
        found = "is a folder" if file.is_dir() else where
        raise ValueError(f"a file of predictions must be a file to write, but {path} {found}: choose another path")


def write_predictions(path: str | os.PathLike[str], predictions: ImagePredictions) -> None:
    """Write the index in the split, label, predicted class, its probability, loss and, if it has one, name of images.

    The file is CSV with a header, or JSON lines, by its suffix. Numbers are the shortest decimals that are the same
    float32; NaN and infinity are null, and empty in CSV. In CSV, bytes of names that are not UTF-8 are written as they
    are, and a name that a spreadsheet would take for a formula after an apostrophe.

    Raises:
        ValueError: as `check_prediction_file`.
        OSError: if it cannot be written; an old file is then unchanged.
    """
    check_prediction_file(path)
    columns = (predictions.labels, predictions.classes[:, 0], predictions.probabilities[:, 0], predictions.losses)
    is_csv, names = Path(path).suffix.lower() == ".csv", predictions.names
    header = _COLUMNS if names is None else (*_COLUMNS, _NAME)
    shown = repeat(()) if names is None else ((spreadsheet_cell(name) if is_csv else name,) for name in names)
    rows = (
        (predictions.index_of(at), *map(_number, row), *name)
        for at, (row, name) in enumerate(zip(zip(*columns, strict=True), shown, strict=names is not None))
    )
    text = io.StringIO(newline="")
    if is_csv:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    else:
        text.writelines(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows)
    write_whole(Path(path), text.getvalue().encode("utf-8", "surrogateescape"))


def _number(value: np.generic) -> int | float | None:
    if isinstance(value, np.integer):
        return int(value)
    return float(str(value)) if math.isfinite(float(value)) else None
