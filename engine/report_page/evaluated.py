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

from loopfeed.engine.config import OFF
from loopfeed.engine.evaluation.result import ClassResult, EvaluationResult, ImagePredictions
from loopfeed.engine.evaluation.run import evaluate
from loopfeed.engine.locations import storage_options_of
from loopfeed.engine.objective.losses import Loss
from loopfeed.engine.objective.metrics import Metric, PerExample
from loopfeed.engine.program.train_state import TrainModel
from loopfeed.engine.records.recorded_run import RecordedRun
from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.data_card import data_place, evaluated_split
from loopfeed.engine.report_page.number_text import number, percent
from loopfeed.engine.stream.sinks import EvaluationRecord
from loopfeed.preprocess.pixels import to_rgb
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.shards.reader import ShardSplit, open_split, read_manifest

LARGEST_MATRIX = 24
"""The largest number of classes for which the page has the whole confusion matrix."""
MOST_CONFUSIONS = 20
_READ_TIMEOUT_S = 60.0
_WEIGHTS = "weights: "  # how the message about the weights begins
# Smaller pictures are kept without loss; larger ones are scaled to this height or width, as JPEG.
_LOSSLESS_PX, _LARGEST_PX, _JPEG_QUALITY = 48, 128, 82


@dataclass(frozen=True)
class OwnParts:
    """What an evaluation of runs with parts of the user's own needs; see `loopfeed.evaluate`."""

    model: TrainModel | None = None
    loss: Loss | None = None
    metrics: Mapping[str, Metric | PerExample] | None = None


class Confusion(NamedTuple):
    """How many images of one class were taken for another one."""

    label: int
    predicted: int
    num_images: int


@dataclass(frozen=True)
class Mistake:
    """An image that was taken for another class.

    Attributes:
        index: its place in the split.
        label, predicted: its class, and the one it was taken for.
        probability: of the latter.
        picture: the file, PNG or JPEG.
        media_type: which of the two.
        is_small: whether it is to be enlarged with sharp pixels.
    """

    index: int
    label: int
    predicted: int
    probability: float
    picture: bytes
    media_type: str
    is_small: bool


@dataclass(frozen=True)
class Decisions:
    """What the decisions on the images show.

    Attributes:
        matrix: int64 [K, K], row = class of the image, column = class that it was taken for; None for many classes.
        confusions: the most frequent confusions, most frequent first.
        num_undecided: number of images with a NaN logit, which are in neither.
        mistakes: the mistakes with the highest probability, highest first.
        num_mistakes: number of all mistakes.
    """

    matrix: npt.NDArray[np.int64] | None
    confusions: tuple[Confusion, ...]
    num_undecided: int
    mistakes: tuple[Mistake, ...]
    num_mistakes: int


@dataclass(frozen=True)
class EvaluatedWeights:
    """The evaluation of the weights of a run.

    Attributes:
        weights: which weights of which model, and after how many steps.
        data: the images.
        messages: what else the evaluation said, oldest first.
        record: the numbers.
        classes: the counts of each class.
        decisions: what the decisions show.
    """

    weights: str
    data: str
    messages: tuple[str, ...]
    record: EvaluationRecord
    classes: tuple[ClassResult, ...]
    decisions: Decisions | Absent

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What was evaluated, and the numbers, by name."""
        record = self.record
        ranks = {"top-1": record.top1, "top-5": record.top5}
        metrics = {name: value for name, value in record.metrics.items() if isinstance(value, int | float)}
        return [
            ("weights", self.weights),
            ("images", self.data),
            *((name, percent(rank)) for name, rank in ranks.items() if not math.isnan(rank)),
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
    own: OwnParts,
    num_pictures: int,
    notify: Callable[[str], None],
) -> EvaluatedWeights | Absent:
    """Evaluate the weights of a run, as `run-eval` does, and count what the page shows.

    Args:
        folder: the run folder.
        recorded: its record.
        data: where its data set is now; None is where the run found it.
        split: the split to evaluate on; None is that of the run.
        own: parts of the user's own.
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
            split = split or evaluated_split(recorded, place)
            config = replace(config, data=place, eval_split=split, synthetic=False)
        elif config.eval_split == OFF:
            config = replace(config, eval_split=None)
        has_classes = place is not None and _has_classes(recorded, place, config.eval_split)
        own_parts: dict[str, Any] = {"model": own.model, "loss": own.loss, "metrics": own.metrics}
        result = evaluate(config, **own_parts, per_class=has_classes, predictions=has_classes, notify=say)
        decisions = _decisions(result, recorded, place, config.eval_split, num_pictures)
    except Exception as error:  # noqa: BLE001 - a device out of memory, a model of the user: the rest of the page stays
        text = str(error).strip().splitlines()
        return Absent(f"the weights were not evaluated: {text[0] if text else type(error).__name__}")
    weights = next((each.removeprefix(_WEIGHTS) for each in messages if each.startswith(_WEIGHTS)), "of the run")
    return EvaluatedWeights(
        weights=weights,
        data=result.data,
        messages=tuple(each for each in messages if not each.startswith((_WEIGHTS, "images: ", "compiled "))),
        record=result.record,
        classes=result.classes,
        decisions=decisions,
    )


def _has_classes(recorded: RecordedRun, place: str, split: str | None) -> bool:
    """Return whether each image has one class, and the model was trained to choose it."""
    if recorded.config.loss != "cross-entropy" or split is None:
        return False
    with suppress(ValueError):  # the evaluation reports it
        location = open_location(place, storage_options=storage_options_of(recorded.config))
        return read_manifest(location, split).targets is None
    return False


def _decisions(
    result: EvaluationResult, recorded: RecordedRun, place: str | None, split: str | None, num_pictures: int
) -> Decisions | Absent:
    predictions = result.predictions
    if predictions is None or place is None or split is None:
        return Absent("confusions and mistakes exist only for images of one class each, and this run has other labels")
    labels, predicted = predictions.labels.astype(np.int64), predictions.classes[:, 0].astype(np.int64)
    options = storage_options_of(recorded.config)
    with open_split(place, split, storage_options=options) as images:
        num_classes = max(images.num_classes, int(predicted.max(initial=0)) + 1)
        chosen = confident_mistakes(predictions, num_pictures)
        pictures = _read_pictures(images, chosen)
    is_decided = predicted >= 0
    return Decisions(
        matrix=count_matrix(labels, predicted, num_classes) if num_classes <= LARGEST_MATRIX else None,
        confusions=most_confused(labels, predicted, MOST_CONFUSIONS),
        num_undecided=int((~is_decided).sum()),
        mistakes=tuple(
            Mistake(
                int(index),
                int(labels[index]),
                int(predicted[index]),
                float(predictions.probabilities[index, 0]),
                *picture,
            )
            for index, picture in zip(chosen, pictures, strict=True)
        ),
        num_mistakes=int((is_decided & (labels != predicted)).sum()),
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
    split.read_into(order, pixels, np.empty(len(order), np.int32), timeout_s=_READ_TIMEOUT_S)
    found = dict(zip(order.tolist(), to_rgb(pixels, split.manifest.pixel_layout), strict=True))
    return [_picture(found[index]) for index in indices]


def _picture(rgb: npt.NDArray[np.uint8]) -> tuple[bytes, str, bool]:
    image, file = Image.fromarray(rgb), io.BytesIO()
    if max(image.size) <= _LOSSLESS_PX:
        image.save(file, "PNG", optimize=True)
        return file.getvalue(), "image/png", True
    image.thumbnail((_LARGEST_PX, _LARGEST_PX), Image.Resampling.LANCZOS)
    image.save(file, "JPEG", quality=_JPEG_QUALITY)
    return file.getvalue(), "image/jpeg", False
