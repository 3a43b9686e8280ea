"""Classification of photographs with trained weights, as an evaluation of their pack decides.

Owns what may be given, the order of the steps and what is returned. `loopfeed.engine.evaluation.programs` owns the
weights and the programs.
"""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate, batched
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.control.signals import StopSignals, call_on_worker, ignore_message
from loopfeed.engine.evaluation.photographs import Geometry, PhotographDecoder, list_photographs, pack_arrays
from loopfeed.engine.evaluation.programs import OpenedWeights, Outputs, PredictorArguments, Programs, open_weights
from loopfeed.engine.feed.batches import Pixels
from loopfeed.engine.feed.feeder import FeederError
from loopfeed.engine.records.weights_metadata import IMAGE_SIZE, TARGETS, image_size_in, resize_rule_of
from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.decoding.default_resize import default_resize
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.system_errors import error_text
from loopfeed.preprocess.workers import Pool

_USUAL_SIZE = 224
_AHEAD = 1  # batch that is decoded while another is classified
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
        predict_s: seconds to decode and classify, without compilation.
        logits: float32 [N, K], the outputs of the network, NaN for an image that cannot be decoded; None if they were
            not asked for.
    """

    images: tuple[str, ...]
    labels: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    classes: tuple[ImageClass, ...]
    failures: Mapping[int, str]
    predict_s: float
    logits: NDArray[np.float32] | None = None

    def class_of(self, label: int) -> ImageClass:
        """Return the class of a label; without names, both its identifier and its name are the label's digits."""
        return self.classes[label] if 0 <= label < len(self.classes) else ImageClass(str(label), str(label))


class Predictor:
    """Trained weights that are kept ready to classify images, for many calls.

    Any number of threads may call it at once. A call's images are computed in batches of the next power of two, at most
    of the batch size of the settings, each size of which is compiled when it is first needed; with `warm_up` that is
    before the first call. The numbers for an image may differ in their last digits between batch sizes.

    Args:
        run_or_file: the folder or URL of a run, which may still be in progress, or weights as `init_from` takes them.
        model: your own model, if the run trained one.
        settings: of `TrainConfig`, to replace those of the run: batch, image_size, eval_mirror, precision, kernels,
            model (of a file), reader_threads, infeed_timeout_s and compilation_cache.
        mean, std: of each channel on the scale 0 … 1; None uses those of the file or, without them, ImageNet's. Only
            for a file.
        resize_rule: values of size, resize, resample, levels and truncated to use instead of those in the weights.
        snapshot: the step of the snapshot of a run, or "best"; None is the run's weights or its newest snapshot.
        notify: called with one-line messages about the weights, from any thread.
        storage_options: how to reach the store of a URL, see `loopfeed.preprocess.storage_options.STORAGE_OPTIONS`.

    Attributes:
        classes: the classes by label, () if the weights do not record them; there can be fewer than K.

    Raises:
        ValueError: the weights, the model and the settings do not fit together.

    Example:
        >>> predictor = Predictor("run", model=model)
        >>> result = predictor.predict("photographs/val/red/0.png", top=1)
        >>> [predictor.classes[label].name for label in result.labels[0]]
        ['red']
    """

    def __init__(self, run_or_file: str | os.PathLike[str], **arguments: Unpack[PredictorArguments]) -> None:
        opened = open_weights(run_or_file, arguments)
        _check_outputs(opened, os.fspath(run_or_file))
        self.classes = opened.classes
        self._opened, self._rule = opened, dict(arguments.get("resize_rule") or {})
        self._notify = arguments.get("notify", ignore_message)
        self._decoder: PhotographDecoder | None = None
        self._programs = Programs(opened, arguments)
        self._pool = Pool(opened.config.reader_threads or 1, "photographs")
        weakref.finalize(self, self._pool.close).atexit = False  # its threads end with this object

    def __repr__(self) -> str:
        """Return the weights and the number of their named classes."""
        return f"Predictor({self._opened.path!r}, {len(self.classes)} classes)"

    def warm_up(self, *num_images: int) -> None:
        """Compile the programs for photographs in batches of these sizes, or of one photograph if none is given."""
        for count in num_images or (1,):
            self._programs.prepare(self._photographs().geometry, self._programs.batch_for(count))

    def predict(self, images: Any, *, top: int = 5, logits: bool = False) -> PredictionResult:
        """Classify images, as `loopfeed.predict` does.

        Args:
            images: a photograph or a list of photographs: paths, the bytes of files, or `PIL.Image.Image` objects, in
                memory also arrays of one image each, if some of the others are bytes or Pillow's; paths of folders of
                photographs; or an array uint8 [N, H, W, 3] of RGB images, of which the centre is the input of the
                network.
            top: T, how many classes to return for each image; all K if there are fewer.
            logits: whether to return the logits too, N · K numbers.

        Raises:
            ValueError: there are no images, or the weights are not for images of their size.
            FeederError: a photograph was not decoded in time.
        """
        return _joined(tuple(self.stream(images, top=top, logits=logits)))

    def stream(self, images: Any, *, top: int = 5, logits: bool = False) -> Iterator[PredictionResult]:
        """Classify images as `predict` does, and yield the result of each batch when there is one."""
        if type(top) is not int or top < 1:
            raise ValueError(f"top must be a whole number ≥ 1, got {top!r}")
        names, given = _listed(images, self._notify)
        # One program for all batches of a call, so that the last one, which is smaller, does not wait for another.
        batch = self._programs.batch_for(len(names))
        # Signals are handled between the batches of many; of one, a thread of its own would be a part of its latency.
        call = call_on_worker if len(names) > batch else _call
        decoded = self._packed(given, batch) if isinstance(given, np.ndarray) else self._decoded(names, given, batch)
        for part in batched(names, batch):
            each = next(decoded)
            found = call(self._programs, each.geometry, each.pixels, each.words, batch) if len(each.pixels) else None
            yield _ranked(part, each, found, min(top, each.num_classes), self.classes, logits=logits)

    def _photographs(self) -> PhotographDecoder:
        if self._decoder is None:
            opened = self._opened
            rule = _rule_of(opened, self._rule, self._notify)
            self._decoder = PhotographDecoder(rule, opened.config.infeed_timeout_s)
        return self._decoder

    def _packed(self, images: NDArray[Any], batch: int) -> Iterator["_Decoded"]:
        """Yield the batches of an array."""
        for start in range(0, len(images), batch):
            started = time.perf_counter()
            pixels = pack_arrays(images[start : start + batch])
            geometry = Geometry(*pixels.shape[1:])
            num_classes = self._programs.prepare(geometry, batch, _LARGER_ARRAYS)
            yield _Decoded(geometry, num_classes, pixels, np.zeros(len(pixels), np.int32), {}, started)

    def _decoded(self, names: Sequence[str], photographs: Sequence[Any], batch: int) -> Iterator["_Decoded"]:
        """Yield the batches of photographs; the next ones are decoded meanwhile."""
        decoder = self._photographs()
        num_classes = self._programs.prepare(decoder.geometry, batch, _LARGER_CROPS)
        submitted = (
            [self._pool.submit(_tried, decoder, each) for each in part] for part in batched(photographs, batch)
        )
        ahead: deque[list[Future[_Tried]]] = deque()
        starts = range(0, len(photographs), batch)
        for start in starts:
            started = time.perf_counter()
            while len(ahead) <= _AHEAD and (more := next(submitted, None)) is not None:
                ahead.append(more)
            tried = [self._wait(each, names[start + row]) for row, each in enumerate(ahead.popleft())]
            rows = [each for each in tried if not isinstance(each, str)]
            failures = {row: each for row, each in enumerate(tried) if isinstance(each, str)}
            shape = decoder.geometry.height, decoder.geometry.width
            pixels = np.stack([each[0] for each in rows]) if rows else np.zeros((0, *shape), np.uint32)
            words = np.array([each[1] for each in rows], np.int32)
            yield _Decoded(decoder.geometry, num_classes, pixels, words, failures, started)

    def _wait(self, future: Future["_Tried"], name: str) -> "_Tried":
        limit_s = self._opened.config.infeed_timeout_s
        try:
            return future.result(limit_s)
        except TimeoutError:
            raise FeederError(
                f"{name} was not read and decoded within {limit_s:g} s: check where it is stored, or raise "
                "infeed_timeout_s"
            ) from None


def predict(
    run_or_file: str | os.PathLike[str],
    images: Any,
    *,
    top: int = 5,
    logits: bool = False,
    **arguments: Unpack[PredictorArguments],
) -> PredictionResult:
    """Classify photographs, resized and cropped as in the pack of the weights, with the computation of its evaluation.

    The probabilities are those of the evaluation but for their last digits: another program computes them, and with
    another batch size float32 sums are in another order. So the class is the same unless two logits are equal but for
    theirs. For many calls with the same weights, see `loopfeed.Predictor`.

    Args:
        run_or_file, arguments: as for `loopfeed.Predictor`, by the same names.
        images, top, logits: as for `loopfeed.Predictor.predict`.

    Raises:
        ValueError: if the weights, the model and the settings do not fit together, or there are no images.
        KeyboardInterrupt: on SIGINT, SIGTERM or SIGHUP, if the caller is the main thread.
        FeederError: if a photograph was not decoded in time.

    Example:
        >>> result = predict("run", ["photographs/val/red/0.png"], model=model, top=1)
        >>> [result.classes[label].name for label in result.labels[0]]
        ['red']
    """
    with StopSignals(ControlBoard(), ignore_message):
        return Predictor(run_or_file, **arguments).predict(images, top=top, logits=logits)


type _Tried = tuple[Pixels, int] | str
"""A decoded photograph and the word of its place, or why it cannot be decoded."""


class _Decoded(NamedTuple):
    """A batch: the pixels and words of the images that were decoded, the failures by row, and when it began."""

    geometry: Geometry
    num_classes: int
    pixels: Pixels
    words: NDArray[np.int32]
    failures: dict[int, str]
    started: float


def _tried(decoder: PhotographDecoder, photograph: Any) -> _Tried:
    try:
        return decoder.decode(photograph)
    except (OSError, ValueError) as error:
        return error_text(error)


def _call[T](function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


def _check_outputs(opened: OpenedWeights, where: str) -> None:
    """Raise ValueError if the outputs of the model are not logits of classes, of which one is right."""
    recorded, targets = opened.recorded, opened.stored.metadata.get(TARGETS)
    other = None
    if recorded is not None and recorded.config.loss != "cross-entropy":
        other = f"with the loss {recorded.config.loss}"
    elif recorded is not None and "loss" in recorded.user_parts and recorded.record.resolved.get("labels") is not None:
        other = f"with a loss of your own, {recorded.user_parts['loss']}, on labels that are not class numbers"
    elif targets is not None:
        other = "for several classes per image" if targets == "classes" else "for numbers"
    if other is not None:
        raise ValueError(
            f"predictions need a model that was trained to choose one class, but {where} was trained {other}: compute "
            "its outputs in Python, with its weights"
        )


def _listed(images: Any, notify: Callable[[str], None]) -> tuple[tuple[str, ...], Sequence[Any] | NDArray[Any]]:
    """Return the names of the images, and the photographs or the array."""
    if isinstance(images, str | os.PathLike | bytes | bytearray | memoryview | Image):
        images = [images]
    if isinstance(images, Sequence | np.ndarray) and len(images) == 0:
        raise ValueError("images must contain at least one image, got none: give paths or an array uint8 [N, H, W, 3]")
    if isinstance(images, Sequence):
        if all(isinstance(each, str | os.PathLike) for each in images):
            files = list_photographs(images, notify)
            return files, files
        if any(isinstance(each, bytes | bytearray | memoryview | Image) for each in images):
            names = (
                os.fspath(each) if isinstance(each, str | os.PathLike) else str(index)
                for index, each in enumerate(images)
            )
            return tuple(names), images
    try:
        array = np.asarray(images)
    except ValueError:
        raise ValueError(
            "arrays of images must have one size, got several: call once for each, or give PIL.Image.Image objects"
        ) from None
    if array.ndim != 4:
        pack_arrays(array)  # refuses it
    return tuple(map(str, range(len(array)))), array


def _rule_of(opened: OpenedWeights, given: Mapping[str, Any], notify: Callable[[str], None]) -> ResizeRule:
    """Return the resize rule of the weights with the given values replaced; say so if the weights record none."""
    where, stored, recorded, _ = opened
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


def _ranked(
    names: tuple[str, ...],
    decoded: _Decoded,
    found: Outputs | None,
    num_ranked: int,
    classes: tuple[ImageClass, ...],
    *,
    logits: bool,
) -> PredictionResult:
    """Return the first classes of a batch; equal logits rank in the order of their classes, as in an evaluation."""
    labels = np.full((len(names), num_ranked), -1, np.int32)
    probabilities = np.full((len(names), num_ranked), np.nan, np.float32)
    numbers = np.full((len(names), decoded.num_classes), np.nan, np.float32) if logits else None
    if found is not None:
        rows = [row for row in range(len(names)) if row not in decoded.failures]
        order = np.argsort(-found.logits, axis=1, kind="stable")[:, :num_ranked]
        is_nan = np.isnan(found.logits).any(axis=1, keepdims=True)
        labels[rows] = np.where(is_nan, -1, order)
        probabilities[rows] = np.take_along_axis(found.probabilities, order, axis=1)
        if numbers is not None:
            numbers[rows] = found.logits
    seconds = time.perf_counter() - decoded.started
    return PredictionResult(names, labels, probabilities, classes, decoded.failures, seconds, numbers)


def _joined(parts: Sequence[PredictionResult]) -> PredictionResult:
    """Return the results of all batches as one."""
    if len(parts) == 1:
        return parts[0]
    starts = accumulate((len(part.images) for part in parts), initial=0)
    logits = [part.logits for part in parts if part.logits is not None]
    return PredictionResult(
        tuple(name for part in parts for name in part.images),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.probabilities for part in parts]),
        parts[0].classes,
        {start + row: why for start, part in zip(starts, parts, strict=False) for row, why in part.failures.items()},
        sum(part.predict_s for part in parts),
        np.concatenate(logits) if logits else None,
    )
