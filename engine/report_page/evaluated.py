"""The evaluation of a run's weights for the page: confusions, accuracy of each class, and confident mistakes.

Owns what is counted from the decisions, and the pictures. `loopfeed.engine.evaluation` computes the decisions. Must not
know: HTML.
"""

import io
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from loopfeed.engine.charts.number_text import number, percent
from loopfeed.engine.config import OFF, TrainConfig
from loopfeed.engine.evaluation.result import ClassResult, EvaluationResult, ImagePredictions, mean_recall
from loopfeed.engine.evaluation.run import evaluate
from loopfeed.engine.owners import storage_options_of
from loopfeed.engine.records.recorded_run import RecordedRun
from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.data_card import data_place, evaluated_split, is_fold
from loopfeed.engine.stream.sinks import EvaluationRecord
from loopfeed.preprocess.extents import all_upright
from loopfeed.preprocess.pixels import to_rgb
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.shards.reader import ShardSplit, open_split, read_manifest

LARGEST_MATRIX = 24
"""The largest number of classes for which the page has the whole confusion matrix."""
MOST_CONFUSIONS = 20
_OTHER_LABELS = Absent("confusions and mistakes exist only for images of one class each, and this run has other labels")
_READ_TIMEOUT_S = 60.0
_WEIGHTS = "weights: "  # how the message about the weights begins
# Smaller pictures are kept without loss; larger ones are scaled to this height or width, as JPEG.
_LOSSLESS_PX, _LARGEST_PX, _JPEG_QUALITY = 48, 128, 82


class Confusion(NamedTuple):
    """How many images of one class were taken for another one."""

    label: int
    predicted: int
    num_images: int


@dataclass(frozen=True)
class Mistake:
    """An image that was taken for another class."""

    index: int  # its place in the split
    label: int
    predicted: int  # the class that it was taken for
    probability: float  # of that class
    picture: bytes  # the file, PNG or JPEG
    media_type: str  # which of the two
    is_small: bool  # whether it is to be enlarged with sharp pixels
    name: str | None  # its name in the pack; None in a pack without names


@dataclass(frozen=True)
class Decisions:
    """What the decisions on the images show."""

    # int64 [K, K], row = class of the image, column = class that it was taken for; None for many classes
    matrix: npt.NDArray[np.int64] | None
    confusions: tuple[Confusion, ...]  # the most frequent confusions, most frequent first
    num_undecided: int  # number of images with a NaN logit, which are in neither
    mistakes: tuple[Mistake, ...]  # the mistakes with the highest probability, highest first
    num_mistakes: int  # number of all mistakes


@dataclass(frozen=True)
class EvaluatedWeights:
    """The evaluation of the weights of a run."""

    weights: str  # which weights of which model, and after how many steps
    data: str  # the images
    messages: tuple[str, ...]  # what else the evaluation said, oldest first
    record: EvaluationRecord  # the numbers
    classes: tuple[ClassResult, ...]  # the counts of each class
    decisions: Decisions | Absent  # what the decisions show

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What was evaluated, and the numbers, by name."""
        record = self.record
        ranks = {"top-1": record.top1, "top-5": record.top5, "balanced accuracy": mean_recall(self.classes)}
        metrics = {name: value for name, value in record.metrics.items() if isinstance(value, int | float)}
        return [
            ("weights", self.weights),
            ("images", self.data),
            *((name, percent(rank)) for name, rank in ranks.items() if rank is not None and not math.isnan(rank)),
            *((name, number(value)) for name, value in {"loss": record.loss, **metrics}.items()),
        ]

    def class_name(self, label: int) -> str:
        """Return the readable name of a class, its number if it has none."""
        return self.classes[label].name if 0 <= label < len(self.classes) else str(label)


def evaluate_weights_of(
    folder: Path,
    recorded: RecordedRun,
    data: str | None,
    split: str | None,
    own: Mapping[str, Any],
    num_pictures: int,
    notify: Callable[[str], None],
) -> EvaluatedWeights | Absent:
    """Evaluate the weights of a run, as `run-eval` does, and count what the page shows.

    Args:
        folder: the run folder.
        recorded: its record.
        data: where its data set is now; None is where the run found it.
        split: the split to evaluate on; None is that of the run.
        own: model, loss and metrics of the user, as for `loopfeed.evaluate`.
        num_pictures: the largest number of mistakes.
        notify: called with one-line messages.
    """
    messages: list[str] = []

    def say(message: str) -> None:
        messages.append(message)
        notify(message)

    try:
        place, config = data, replace(recorded.config, run_dir=str(folder))
        if not (config.synthetic and data is None) and recorded.manifest_digest is not None:
            place = data_place(recorded, data)
        if place is not None:
            name = None if is_fold(recorded.config, split) else split or evaluated_split(recorded, place)
            config = replace(config, data=place, eval_split=name, synthetic=False)
        elif config.eval_split == OFF:
            config = replace(config, eval_split=None)
        has_classes = place is not None and _has_classes(config, place)
        result = evaluate(config, **own, per_class=has_classes, predictions=has_classes, notify=say)
        decisions = _decisions(result, config, num_pictures) if has_classes else _OTHER_LABELS
    except Exception as error:  # noqa: BLE001 - a device out of memory, a model of the user: the rest of the page stays
        text = str(error).strip().splitlines()
        return Absent(f"the weights were not evaluated: {text[0] if text else type(error).__name__}")
    weights = next((each.removeprefix(_WEIGHTS) for each in messages if each.startswith(_WEIGHTS)), "of the run")
    others = tuple(each for each in messages if not each.startswith((_WEIGHTS, "images: ", "compiled ")))
    return EvaluatedWeights(weights, result.data, others, result.record, result.classes, decisions)


def _has_classes(config: TrainConfig, place: str) -> bool:
    """Return whether each image has one class, and the model was trained to choose it."""
    name = _split_of(config)
    if config.loss != "cross-entropy" or name is None:
        return False
    with suppress(ValueError):  # the evaluation reports it
        location = open_location(place, storage_options=storage_options_of(config))
        return read_manifest(location, name).targets is None
    return False


def _split_of(config: TrainConfig) -> str | None:
    """Return the split that has the evaluated images, None if there is none."""
    return config.split if is_fold(config, config.eval_split) else config.eval_split


def _decisions(result: EvaluationResult, config: TrainConfig, num_pictures: int) -> Decisions:
    predictions = result.predictions
    assert predictions is not None
    name = _split_of(config)
    assert config.data is not None
    assert name is not None
    labels, predicted = predictions.labels.astype(np.int64), predictions.classes[:, 0].astype(np.int64)
    chosen = confident_mistakes(predictions, num_pictures)
    with open_split(config.data, name, storage_options=storage_options_of(config)) as images:
        num_classes = max(images.num_classes, int(predicted.max(initial=0)) + 1)
        pictures = _read_pictures(images, [predictions.index_of(at) for at in chosen])
    names = [None if predictions.names is None else printable(predictions.names[at]) for at in chosen]
    found = zip(chosen, pictures, names, predictions.probabilities[chosen, 0].tolist(), strict=True)
    return Decisions(
        matrix=count_matrix(labels, predicted, num_classes) if num_classes <= LARGEST_MATRIX else None,
        confusions=most_confused(labels, predicted, MOST_CONFUSIONS),
        num_undecided=int((predicted < 0).sum()),
        mistakes=tuple(
            Mistake(predictions.index_of(at), int(labels[at]), int(predicted[at]), part, *picture, name)
            for at, picture, name, part in found
        ),
        num_mistakes=int(((predicted >= 0) & (labels != predicted)).sum()),
    )


def count_matrix(
    labels: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64], num_classes: int
) -> npt.NDArray[np.int64]:
    """Return the confusion matrix, int64 [K, K]; images with a negative prediction are left out."""
    matrix = np.zeros((num_classes, num_classes), np.int64)
    is_decided = predicted >= 0
    np.add.at(matrix, (labels[is_decided], predicted[is_decided]), 1)
    return matrix


def most_confused(labels: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64], most: int) -> tuple[Confusion, ...]:
    """Return the most frequent confusions; equal ones in the order of their classes."""
    is_wrong = (predicted >= 0) & (labels != predicted)
    pairs, counts = np.unique(np.stack([labels[is_wrong], predicted[is_wrong]], axis=1), axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:most]
    return tuple(Confusion(int(pairs[at, 0]), int(pairs[at, 1]), int(counts[at])) for at in order)


def confident_mistakes(predictions: ImagePredictions, most: int) -> list[int]:
    """Return the indices of the wrong decisions with the highest probability, highest first."""
    predicted, probability = predictions.classes[:, 0], predictions.probabilities[:, 0]
    wrong = np.flatnonzero((predicted >= 0) & (predicted != predictions.labels) & np.isfinite(probability))
    return [int(index) for index in wrong[np.argsort(-probability[wrong], kind="stable")[:most]]]


def _read_pictures(split: ShardSplit, indices: list[int]) -> list[tuple[bytes, str, bool]]:
    """Return content, media type, and whether it is small, of the picture of each image."""
    if not indices:
        return []
    order = np.array(sorted(indices), np.int64)
    pixels = np.empty((len(order), split.height, split.row_words), np.uint32)
    labels = np.empty((len(order), *split.label_row), np.int32)
    split.read_into(order, pixels, labels, timeout_s=_READ_TIMEOUT_S)
    images = list(to_rgb(pixels, split.manifest.pixel_layout))
    if split.manifest.is_whole:
        images = all_upright(images, labels)
    found = dict(zip(order.tolist(), images, strict=True))
    return [_picture(found[index]) for index in indices]


def _picture(rgb: npt.NDArray[np.uint8]) -> tuple[bytes, str, bool]:
    image, file = Image.fromarray(rgb), io.BytesIO()
    if max(image.size) <= _LOSSLESS_PX:
        image.save(file, "PNG", optimize=True)
        return file.getvalue(), "image/png", True
    image.thumbnail((_LARGEST_PX, _LARGEST_PX), Image.Resampling.LANCZOS)
    image.save(file, "JPEG", quality=_JPEG_QUALITY)
    return file.getvalue(), "image/jpeg", False
