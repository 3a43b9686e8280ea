"""Trained weights that are kept ready to classify images: the programs are compiled once, for batches of any size.

Owns which weights are used and the programs. `loopfeed.engine.evaluation.predict` owns what is done with photographs
that cannot be decoded, and what is returned.
"""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32
from numpy.typing import NDArray

from loopfeed.engine.compilation.ahead_of_time import caching_compilations, compile_traced, trace_ahead
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.signals import call_on_worker, ignore_message
from loopfeed.engine.crossing.choice import this_device, this_platform, traced_platform
from loopfeed.engine.evaluation.photographs import Geometry
from loopfeed.engine.evaluation.subject import (
    PACK_AGAIN,
    Channels,
    Subject,
    at_one_size,
    check_user_model,
    describe_weights_of,
    file_subject,
    read_weights_file,
    run_subject,
)
from loopfeed.engine.feed.batches import Pixels
from loopfeed.engine.images.augment import prepare_for_evaluation
from loopfeed.engine.images.unpack import PixelScale
from loopfeed.engine.objective.objective import logits_of
from loopfeed.engine.program.checked_model import CheckedModel
from loopfeed.engine.program.evaluate_split import mean_of_halves
from loopfeed.engine.program.kernels import refuse_missing_kernels, settle_kernels
from loopfeed.engine.program.train_state import TrainModel
from loopfeed.engine.records.given_weights import find_run
from loopfeed.engine.records.stored.reading import naming, naming_in
from loopfeed.engine.records.trained_run import TrainedRun, reading_run
from loopfeed.engine.records.weights import StoredWeights
from loopfeed.engine.records.weights_metadata import IMAGE_SIZE, MEAN, STD, check_metadata, classes_of
from loopfeed.engine.run.program_settings import compiled_settings
from loopfeed.engine.settings import SettingError
from loopfeed.engine.updates.update import Weights
from loopfeed.preprocess.control_groups import num_cores
from loopfeed.preprocess.shards.classes import ImageClass

# Of a caller with arrays of ever other sizes, only the programs for the last few sizes are kept.
_MOST_GEOMETRIES = 8
# The only one that has an effect on photographs.
_OF_USER = ("compilation_cache",)


class PredictorArguments(TypedDict, total=False):
    """The keyword arguments of `loopfeed.Predictor`, which describes them."""

    model: TrainModel | None
    settings: Mapping[str, Any] | None
    mean: Channels | None
    std: Channels | None
    resize_rule: Mapping[str, Any] | None
    snapshot: int | Literal["best"] | None
    notify: Callable[[str], None]
    storage_options: Mapping[str, str] | None


class Outputs(NamedTuple):
    """What a network says of images.

    Attributes:
        logits: float32 [N, K].
        probabilities: float32 [N, K], their softmax.
    """

    logits: NDArray[np.float32]
    probabilities: NDArray[np.float32]


class OpenedWeights(NamedTuple):
    """The weights to classify with, and the settings.

    Attributes:
        path: what the user named.
        stored: the weights.
        recorded: the run that they are from, None for a file.
        config: the settings of the evaluation.
    """

    path: str
    stored: StoredWeights
    recorded: TrainedRun | None
    config: TrainConfig

    @property
    def classes(self) -> tuple[ImageClass, ...]:
        """The classes by label, () if the weights do not record them."""
        return classes_of(self.stored.metadata, self.path)


def open_weights(run_or_file: str | os.PathLike[str], arguments: PredictorArguments) -> OpenedWeights:
    """Read the weights of a run or of a file; raise TypeError for an argument that `loopfeed.Predictor` lacks."""
    for name in arguments:
        if name not in PredictorArguments.__annotations__:
            raise TypeError(f"unexpected keyword argument {name!r}")
    given, notify = dict(arguments.get("settings") or {}), arguments.get("notify", ignore_message)
    if (run := find_run(run_or_file, arguments.get("snapshot"))) is None:
        return _open_file(os.fspath(run_or_file), given, arguments, notify)
    where, snapshot = run
    options = arguments.get("storage_options")
    with reading_run(where, snapshot, notify, storage_options=options) as (recorded, say):
        of_file = {"model": given.get("model"), "mean": arguments.get("mean"), "std": arguments.get("std")}
        for name, value in of_file.items():
            if value is not None:
                raise SettingError(
                    name,
                    "{setting} can be given only with a weights file, got the run {path} instead: leave {setting} out",
                    path=where,
                )
        config = replace(recorded.config, **at_one_size(given))
        if (line := recorded.record.describe_replaced(config, _OF_USER, _OF_USER)) is not None:
            say(line)
        check_user_model(recorded, arguments.get("model"), command="predict-images")
        describe_weights_of(recorded, say, is_chosen=snapshot is not None)
        return OpenedWeights(where, recorded.weights, recorded, _settled(config, given))


def _open_file(
    name: str, given: Mapping[str, Any], arguments: PredictorArguments, notify: Callable[[str], None]
) -> OpenedWeights:
    if arguments.get("snapshot") is not None:
        raise ValueError(f"a snapshot can be given only with a run, got the file {name}: give the folder of the run")
    config = _settled(replace(TrainConfig(), **at_one_size(given)), given)
    is_of_registry = arguments.get("model") is None
    stored = read_weights_file(name, config, notify, arguments.get("storage_options"), is_of_registry=is_of_registry)
    scale = {MEAN: arguments.get("mean"), STD: arguments.get("std")}
    given_scale = {key for key, value in scale.items() if value is not None}
    given_size = {IMAGE_SIZE} if given.get("image_size") is not None else set()
    check_metadata(stored.metadata, name, given=given_scale | given_size)
    return OpenedWeights(name, stored, None, config)


def _settled(config: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    refuse_missing_kernels(config, given, this_platform())
    # The labels of photographs are unknown: the loss is not used.
    config = replace(config, loss="cross-entropy", label_smoothing=0.0)
    return config if "reader_threads" in given else replace(config, reader_threads=num_cores())


type Program = Callable[[Weights, Pixels, NDArray[np.int32] | None, PixelScale], tuple[jax.Array, jax.Array]]
"""Weights, packed pixels [B, H, W], the words of whole pictures [B] and the scale → logits and probabilities [B, K]."""


class _Ready(NamedTuple):
    program: Program
    num_classes: int
    subject: Subject
    scale: PixelScale


class Programs:
    """The programs that classify with some weights: one for each size of images and of a batch.

    Any thread may call it; a program is compiled when it is first needed, while other threads that need it wait.

    Args:
        opened: the weights.
        arguments: those that `opened` was opened with.
    """

    def __init__(self, opened: OpenedWeights, arguments: PredictorArguments) -> None:
        self._opened, self._model = opened, arguments.get("model")
        self._mean, self._std = arguments.get("mean"), arguments.get("std")
        self._notify = arguments.get("notify", ignore_message)
        self._guard = threading.Lock()
        self._subjects: dict[Geometry, Subject] = {}  # guarded by _guard, as is the following
        self._programs: dict[tuple[Geometry, int], _Ready] = {}

    @property
    def largest_batch(self) -> int:
        """The largest number of images of a program, which is the batch size of the settings."""
        return self._opened.config.batch

    def batch_for(self, num_images: int) -> int:
        """Return the number of images of the program for so many: the next power of two, at most `largest_batch`."""
        return min(1 << max(num_images - 1, 0).bit_length(), self.largest_batch)

    def prepare(self, geometry: Geometry, batch: int, remedy: str = PACK_AGAIN) -> int:
        """Compile the program for a batch if it is not yet, and return the number of classes, K.

        Args:
            geometry: the size of the images.
            batch: the number of images of the program.
            remedy: what to do about images of another size than the weights are for.

        Raises:
            ValueError: the weights are not for images of this size.
        """
        return self._find(geometry, batch, remedy).num_classes

    def __call__(self, geometry: Geometry, pixels: Pixels, words: NDArray[np.int32], batch: int) -> Outputs:
        """Return the outputs for packed images, uint32 [n, H, W], by the program for `batch` ≥ n images.

        `words` are the places of whole pictures, int32 [n].
        """
        count = len(pixels)
        program, _, subject, scale = self._find(geometry, batch, PACK_AGAIN)
        padded = np.zeros((batch, *pixels.shape[1:]), np.uint32)
        padded[:count] = pixels
        places = None
        if geometry.whole is not None:
            places = np.full(batch, words[0], np.int32)
            places[:count] = words
        logits, probabilities = program(subject.weights, padded, places, scale)
        return Outputs(np.asarray(logits)[:count], np.asarray(probabilities)[:count])

    def _find(self, geometry: Geometry, batch: int, remedy: str) -> _Ready:
        # Without the lock, which a thread that compiles holds for long.
        if (found := self._programs.get((geometry, batch))) is not None:
            return found
        with self._guard:
            if (found := self._programs.get((geometry, batch))) is None:
                subject = self._subject(geometry, remedy)
                scale = PixelScale(jnp.array(subject.mean, jnp.float32), jnp.array(subject.std, jnp.float32))
                found = _Ready(*self._compile(subject, geometry, batch, scale), subject, scale)
                self._programs[geometry, batch] = found
            return found

    def _subject(self, geometry: Geometry, remedy: str) -> Subject:
        if (found := self._subjects.get(geometry)) is not None:
            return found
        path, stored, recorded, config = self._opened
        if recorded is None:
            found = file_subject(
                path, stored, config, geometry, self._mean, self._std, self._notify, remedy, self._model
            )
            unchecked = " (no digest: unchecked)" if stored.digest is None else ""
            self._notify(f"weights: {path}, {found.name}{unchecked}")
        else:
            # The copy of a stored run is gone, and so is its name.
            with naming(recorded.path, path):
                say = naming_in(self._notify, recorded.path, path)
                found = run_subject(recorded, config, self._model, geometry, say, remedy)
        self._subjects[geometry] = found
        if len(self._subjects) > _MOST_GEOMETRIES:
            oldest = next(iter(self._subjects))
            del self._subjects[oldest]
            self._programs = {key: each for key, each in self._programs.items() if key[0] != oldest}
        return found

    def _compile(self, subject: Subject, geometry: Geometry, batch: int, scale: PixelScale) -> tuple[Program, int]:
        config = subject.config
        pixels = jax.ShapeDtypeStruct((batch, geometry.height, geometry.width), jnp.uint32)
        words = None if geometry.whole is None else jax.ShapeDtypeStruct((batch,), jnp.int32)
        forward = make_forward(subject, geometry, settle_kernels(config, this_platform()).kernels)
        with caching_compilations(config.compilation_cache, self._notify):
            platform = traced_platform(this_device())
            traced = trace_ahead(partial(_classify, forward), subject.weights, pixels, words, scale, platform=platform)
            compiled = call_on_worker(partial(compile_traced, traced, deterministic=config.deterministic))
        self._notify(
            f"compiled the program for {batch} images in {compiled.compile_s:.1f} s"
            + " (from the cache)" * compiled.from_cache
        )
        return compiled.call, traced.lowered.out_info[0].shape[1]


type Forward = Callable[[Weights, UInt32[Array, "B H W"], Int32[Array, "B"] | None, PixelScale], Any]
"""Weights, packed pixels, the words of whole pictures and the scale → the outputs of the network."""


def make_forward(subject: Subject, geometry: Geometry, kernels: str) -> Forward:
    """Return the function that an evaluation computes for a batch, from packed pixels to the network's outputs.

    Args:
        subject: the model and how images are prepared for it; its weights are not used.
        geometry: the size of the images.
        kernels: those of a CPU, `loopfeed.models.kernels.XLA` or `ONEDNN`.
    """
    # What only augments training images must not refuse others.
    config = replace(subject.config, crop="centre", crop_padding=0, padding_mode="zeros")
    settings = compiled_settings(config, whole=geometry.whole)
    model = CheckedModel(subject.model, subject.num_classes, geometry, kernels)

    def forward(
        weights: Weights,
        pixels: UInt32[Array, "B H W"],
        words: Int32[Array, "B"] | None,
        scale: PixelScale,
    ) -> Any:
        images = prepare_for_evaluation(settings.evaluated_augmentation, pixels, scale, words)
        if settings.eval_mirror:
            images = jnp.concatenate([images, images[:, :, ::-1]])
        outputs, _ = model.apply(weights.params, weights.batch_stats, images, train=False)
        return jax.tree.map(mean_of_halves, outputs) if settings.eval_mirror else outputs

    return forward


def _classify(
    forward: Forward,
    weights: Weights,
    pixels: UInt32[Array, "B H W"],
    words: Int32[Array, "B"] | None,
    scale: PixelScale,
) -> tuple[Float32[Array, "B K"], Float32[Array, "B K"]]:
    logits = logits_of(forward(weights, pixels, words, scale)).astype(jnp.float32)
    # As in the tally of an evaluation, whose bits these are.
    return logits, jnp.exp(logits - jax.nn.logsumexp(logits, axis=1)[:, None])
