"""Classification of photographs with trained weights, by the program that evaluates them.

Owns the order of the steps and what is returned. `loopfeed.engine.evaluation.counting` compiles and runs the program.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.control.signals import StopSignals, ignore_message
from loopfeed.engine.crossing.choice import this_platform
from loopfeed.engine.evaluation.counting import RankedClasses, predictions_of, run_evaluation
from loopfeed.engine.evaluation.photographs import PhotographBatches, RgbBatches, list_photographs
from loopfeed.engine.evaluation.subject import (
    Channels,
    Subject,
    at_one_size,
    check_user_model,
    describe_weights_of,
    file_subject,
    run_subject,
)
from loopfeed.engine.parts import NO_PARTS
from loopfeed.engine.program.kernels import refuse_missing_kernels
from loopfeed.engine.program.train_state import TrainModel
from loopfeed.engine.records.stored.reading import local_copy, naming_in, with_weights
from loopfeed.engine.records.trained_run import TrainedRun, read_run
from loopfeed.engine.records.weights import StoredWeights, read_weights
from loopfeed.engine.records.weights_metadata import (
    IMAGE_SIZE,
    MEAN,
    STD,
    TARGETS,
    check_metadata,
    classes_of,
    image_size_in,
    resize_rule_of,
)
from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.control_groups import num_cores
from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.decoding.default_resize import default_resize
from loopfeed.preprocess.shards.classes import ImageClass

_USUAL_SIZE = 224
# The only one that has an effect on photographs.
_OF_USER = ("compilation_cache",)
_LARGER_CROPS = "crop the photographs to that size (--size, and --resize for the shorter side before the crop)"
_LARGER_ARRAYS = "give arrays of that size"


@dataclass(frozen=True)
class PredictionResult:
    """The first classes of each image.

    Attributes:
        images: the paths of the photographs, or the indices of the images, as text (N).
        labels: int32 [N, T], the T most probable classes of each image, most probable first; -1 for an image that
            cannot be decoded, or with a NaN logit.
        probabilities: float32 [N, T], their softmax probabilities; NaN for an image that cannot be decoded.
        classes: the classes by label, () if the weights do not record them; there can be fewer than K.
        failures: the reason for each image that cannot be decoded, by its index.
        predict_s: seconds from the launch of the program to its end.
    """

    images: tuple[str, ...]
    labels: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    classes: tuple[ImageClass, ...]
    failures: Mapping[int, str]
    predict_s: float

    def class_of(self, label: int) -> ImageClass:
        """Return the class of a label; without names, both its identifier and its name are the label's digits."""
        return self.classes[label] if 0 <= label < len(self.classes) else ImageClass(str(label), str(label))


def predict(
    run_or_file: str | os.PathLike[str],
    images: Any,
    *,
    top: int = 5,
    model: TrainModel | None = None,
    settings: Mapping[str, Any] | None = None,
    mean: Channels | None = None,
    std: Channels | None = None,
    resize_rule: Mapping[str, Any] | None = None,
    notify: Callable[[str], None] = lambda _: None,
    storage_options: Mapping[str, str] | None = None,
) -> PredictionResult:
    """Classify photographs, with the same preprocessing and the same program as an evaluation of their pack.

    With the batch size of an evaluation, the decisions are those of the evaluation on a CPU bit for bit; with another
    one, probabilities may differ in their last digits.

    Args:
        run_or_file: the folder or URL of a run, which may still be in progress, or a safetensors file.
        images: paths of photographs and of folders of photographs, or an array uint8 [N, H, W, 3] of RGB images, of
            which the centre is the input of the network.
        top: T, how many classes to return for each image; all K if there are fewer.
        model: your own model, if the run trained one.
        settings: of `TrainConfig`, to replace those of the run: batch, image_size, eval_mirror, precision, kernels,
            model (of a file) and those of the infeed and the compilation.
        mean, std: of each channel on the scale 0 … 1; None uses those of the file or, without them, ImageNet's. Only
            for a file.
        resize_rule: values of size, resize, resample, levels and truncated to use instead of those in the weights.
        notify: called with one-line messages about the weights.
        storage_options: how to reach the store of a URL, see `loopfeed.preprocess.storage_options.STORAGE_OPTIONS`.

    Raises:
        ValueError: if the weights, the model and the settings do not fit together, or there are no images.
        KeyboardInterrupt: on SIGINT, SIGTERM or SIGHUP, if the caller is the main thread.
        FeederError: if a batch was not decoded in time.

    Example:
        >>> result = predict("run", ["photographs/val/red/0.png"], model=model, top=1)
        >>> [result.classes[label].name for label in result.labels[0]]
        ['red']
    """
    if type(top) is not int or top < 1:
        raise ValueError(f"top must be a whole number ≥ 1, got {top!r}")
    with local_copy(run_or_file, storage_options, with_weights(None)) as path:
        say = naming_in(notify, path, run_or_file)
        return _predict(path, images, top, model, dict(settings or {}), mean, std, resize_rule, say)


def _predict(
    path: Path,
    images: Any,
    top: int,
    model: TrainModel | None,
    given: Mapping[str, Any],
    mean: Channels | None,
    std: Channels | None,
    resize_rule: Mapping[str, Any] | None,
    notify: Callable[[str], None],
) -> PredictionResult:
    """Classify with the weights of a run folder or of a file."""
    recorded = None if path.is_file() else read_run(path)
    stored = read_weights(path) if recorded is None else recorded.weights
    if recorded is not None:
        _check_labels(recorded)
    given_scale = {key for key, value in ((MEAN, mean), (STD, std)) if value is not None}
    given_size = {IMAGE_SIZE} if given.get("image_size") is not None else set()
    check_metadata(stored.metadata, os.fspath(path), given=given_scale | given_size)
    _check_outputs(stored, path)
    if recorded is not None:
        _check_leaves_out(path, {"model": given.get("model"), "mean": mean, "std": std})
        check_user_model(recorded, model, function="loopfeed.predict", command="predict-images")
    elif model is not None:
        raise ValueError(f"a model can be given only with a run, got the file {path}: give the folder of the run")
    config = replace(TrainConfig() if recorded is None else recorded.config, **at_one_size(given))
    if recorded is not None and (line := recorded.record.describe_replaced(config, _OF_USER, _OF_USER)) is not None:
        notify(line)
    refuse_missing_kernels(config, given, this_platform())
    # The labels of photographs are unknown: the loss is not used.
    config = replace(config, loss="cross-entropy", label_smoothing=0.0)
    if "reader_threads" not in given:
        config = replace(config, reader_threads=num_cores())
    names, source = _open(images, config, stored, os.fspath(path), recorded, resize_rule, notify)
    remedy = _LARGER_CROPS if isinstance(source, PhotographBatches) else _LARGER_ARRAYS
    board = ControlBoard()
    with StopSignals(board, ignore_message):
        if recorded is None:
            subject = file_subject(os.fspath(path), stored, config, source, mean, std, notify, remedy)
            notify(f"weights: {path}, {subject.name}" + (" (no digest: unchecked)" if stored.digest is None else ""))
        else:
            subject = run_subject(recorded, config, model, source, notify, remedy)
            describe_weights_of(recorded, subject, notify, is_chosen=False)
        return _classify(subject, source, names, top, classes_of(stored.metadata, os.fspath(path)), board, notify)


def _check_leaves_out(path: Path, of_file: Mapping[str, Any]) -> None:
    """Raise ValueError if one of the settings that only a weights file needs is given with a run."""
    for name, value in of_file.items():
        if value is not None:
            raise SettingError(
                name,
                "{setting} can be given only with a weights file, got the run {path} instead: leave {setting} out",
                path=path,
            )


def _check_labels(recorded: TrainedRun) -> None:
    """Raise ValueError if the outputs of the model are not logits of classes, of which one is right."""
    if recorded.config.loss != "cross-entropy":
        raise ValueError(
            f"predictions need a model that was trained to choose one class, but {recorded.path} was trained with the "
            f"loss {recorded.config.loss}: compute its outputs in Python, with its weights"
        )
    if "loss" in recorded.user_parts and recorded.record.resolved.get("labels") is not None:
        raise ValueError(
            f"predictions need a model that was trained to choose one class, but {recorded.path} was trained with a "
            f"loss of your own, {recorded.user_parts['loss']}, on labels that are not class numbers: compute its "
            "outputs in Python, with its weights"
        )


def _check_outputs(stored: StoredWeights, path: Path) -> None:
    """Raise ValueError if the weights record outputs that are not logits of classes, of which one is right."""
    if (targets := stored.metadata.get(TARGETS)) is not None:
        outputs = "several classes per image" if targets == "classes" else "numbers"
        raise ValueError(
            f"predictions need a model that was trained to choose one class, but {path} was trained for {outputs}: "
            "compute its outputs in Python, with its weights"
        )


def _open(
    images: Any,
    config: TrainConfig,
    stored: StoredWeights,
    where: str,
    recorded: TrainedRun | None,
    resize_rule: Mapping[str, Any] | None,
    notify: Callable[[str], None],
) -> tuple[tuple[str, ...], PhotographBatches | RgbBatches]:
    """Return the names of the images, and the source of their batches."""
    if isinstance(images, str | os.PathLike):
        images = [images]
    if isinstance(images, Sequence | np.ndarray) and len(images) == 0:
        raise ValueError("images must contain at least one image, got none: give paths or an array uint8 [N, H, W, 3]")
    if isinstance(images, Sequence) and images and all(isinstance(each, str | os.PathLike) for each in images):
        files = list_photographs(images, notify)
        rule = _rule_of(stored, where, recorded, resize_rule or {}, notify)
        batch, timeout_s = _batch_for(len(files), config), config.infeed_timeout_s
        return files, PhotographBatches(files, rule, batch=batch, timeout_s=timeout_s)
    array = np.asarray(images)
    return tuple(map(str, range(len(array)) if array.ndim else ())), RgbBatches(
        array, batch=_batch_for(len(array) if array.ndim else 1, config)
    )


def _batch_for(num_images: int, config: TrainConfig) -> int:
    """Return the batch size: that of the settings, or the next power of two if there are fewer images."""
    return min(config.batch, _power_of_two(num_images))


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _rule_of(
    stored: StoredWeights,
    where: str,
    recorded: TrainedRun | None,
    given: Mapping[str, Any],
    notify: Callable[[str], None],
) -> ResizeRule:
    """Return the resize rule of the weights with the given values replaced; say so if the weights record none."""
    found = resize_rule_of(stored.metadata, where)
    if found is not None:
        try:
            return ResizeRule.from_json({**found, **given})
        except ValueError as error:
            with_others = f", with {', '.join(given)} as given" if given else ""
            raise ValueError(
                f"the metadata preprocessing of {where} must be a resize rule{with_others}, but {error}"
            ) from None
    height, _ = image_size_in(stored.metadata.get(IMAGE_SIZE, "")) or (_USUAL_SIZE, 0)
    size = given.get("size") or (recorded.shape[0] if recorded else height)
    rule = ResizeRule(**{"size": size, "resize": default_resize(size), **given})
    if not {"size", "resize", "resample"} <= given.keys():
        notify(
            f"warning: the weights do not record how their images were made; photographs are resized to {rule.resize} "
            f"px ({rule.resample}) and cropped to {rule.size} px: give --size, --resize and --resample if that differs"
        )
    return rule


def _classify(
    subject: Subject,
    source: PhotographBatches | RgbBatches,
    names: tuple[str, ...],
    top: int,
    classes: tuple[ImageClass, ...],
    board: ControlBoard,
    notify: Callable[[str], None],
) -> PredictionResult:
    # The number of rows is part of the program: powers of two, so that few programs are compiled.
    ranked = RankedClasses(top, _power_of_two(source.num_batches) * source.batch)
    counted = run_evaluation(subject, source, board, NO_PARTS, per_class=False, ranked=ranked, notify=notify)
    found = predictions_of(counted.tally)
    assert found is not None
    num_ranked = found.classes.shape[1]
    labels = np.full((len(names), num_ranked), -1, np.int32)
    probabilities = np.full((len(names), num_ranked), np.nan, np.float32)
    decoded = [index for index in range(len(names)) if index not in source.failures]
    labels[decoded], probabilities[decoded] = found.classes, found.probabilities
    return PredictionResult(names, labels, probabilities, classes, dict(source.failures), counted.evaluate_s)
