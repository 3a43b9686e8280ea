"""The evaluation program: compiled, run over all images of a source, and its counts.

The loop (`loopfeed.engine.program.evaluate_split`) and the crossings that feed it are the same as in training.
"""

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopfeed.engine.compilation.ahead_of_time import Compiled, caching_compilations, compile_traced, trace_ahead
from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.control.signals import call_on_worker
from loopfeed.engine.crossing.choice import (
    choose_chunk,
    choose_transport,
    make_infeed,
    this_device,
    this_platform,
    traced_platform,
)
from loopfeed.engine.crossing.infeed import BatchInfeed
from loopfeed.engine.crossing.token import first_token
from loopfeed.engine.crossing.transport import Transport
from loopfeed.engine.evaluation.result import ImagePredictions
from loopfeed.engine.evaluation.subject import (
    Subject,
)
from loopfeed.engine.feed.batches import CheckedSource, EvaluationSource, label_form_of, whole_of
from loopfeed.engine.feed.feeder import Feeder, ring_depth
from loopfeed.engine.images.augment import prepare_for_evaluation
from loopfeed.engine.images.unpack import PixelScale
from loopfeed.engine.objective.batch_size_check import check_batch_size
from loopfeed.engine.objective.objective import logits_of
from loopfeed.engine.objective.tally import Tally, empty_predictions, empty_tally
from loopfeed.engine.parts import UserParts
from loopfeed.engine.program.checked_model import CheckedModel
from loopfeed.engine.program.evaluate_split import evaluate_split
from loopfeed.engine.program.kernels import settle_kernels
from loopfeed.engine.run.program_settings import compiled_settings
from loopfeed.engine.updates.settings import CompiledSettings
from loopfeed.engine.updates.update import Weights


class RankedClasses(NamedTuple):
    """How many of the first classes of each image to return, and the largest number of images."""

    num_classes: int
    num_images: int


class Counted(NamedTuple):
    """The tally of an evaluation as NumPy arrays, its program and its times in seconds."""

    tally: Tally
    settings: CompiledSettings
    compiled: Compiled
    evaluate_s: float
    wait_s: float


def run_evaluation(
    subject: Subject,
    source: EvaluationSource,
    board: ControlBoard,
    parts: UserParts,
    *,
    per_class: bool,
    ranked: RankedClasses | None,
    notify: Callable[[str], None],
) -> Counted:
    """Compile the evaluation program for the images of a source, and run it."""
    config = subject.config
    transport = choose_transport(config.transport, this_platform())
    infeed = make_infeed(
        transport,
        Feeder(
            source,
            start_index=0,
            stop_index=source.num_batches,
            depth=ring_depth(source, config.prefetch),
            num_threads=config.reader_threads,
            timeout_s=config.infeed_timeout_s,
            name_batch=lambda index: f"evaluation pull {index + 1} of {source.num_batches}",
        ),
        board,
        words_of=lambda _, num_batches: board.stop_words(num_batches),
        chunk=choose_chunk(None, transport),
    )
    # What only augments training images must not refuse others.
    config = replace(subject.config, crop="centre", crop_padding=0, padding_mode="zeros")
    settings = compiled_settings(config, parts, evaluated_form=label_form_of(source), whole=whole_of(source))
    compiled = _compile(subject, settings, source, transport, infeed, notify, per_class=per_class, ranked=ranked)
    notify(f"compiled the evaluation program in {compiled.compile_s:.1f} s" + " (from the cache)" * compiled.from_cache)
    started = time.perf_counter()
    tally = _launch(compiled, subject, source, transport, infeed, board)
    evaluate_s = time.perf_counter() - started
    wait_s = math.fsum(infeed.take_wait_s(index) for index in range(source.num_batches))
    return Counted(tally, settings, compiled, evaluate_s, wait_s)


def predictions_of(tally: Tally) -> ImagePredictions | None:
    """Return the decision on each image, without unused rows; None if the tally has none."""
    if tally.predictions is None:
        return None
    labels, classes, probabilities, losses = (np.asarray(each)[: int(tally.num_images)] for each in tally.predictions)
    return ImagePredictions(labels, classes, probabilities, losses)


def _compile(
    subject: Subject,
    settings: CompiledSettings,
    source: EvaluationSource,
    transport: Transport,
    infeed: BatchInfeed,
    notify: Callable[[str], None],
    *,
    per_class: bool,
    ranked: RankedClasses | None,
) -> Compiled:
    """Trace the program on the calling thread, whose jax settings apply, and compile it on a worker thread."""
    kernels = settle_kernels(subject.config, this_platform()).kernels
    model = CheckedModel(subject.model, subject.num_classes, source, kernels)

    def program(weights: Weights, num_batches: jax.Array, scale: PixelScale) -> tuple[Tally, jax.Array]:
        num_logits = _num_logits(model, weights, subject, settings, source) if per_class or ranked else 0
        rows = None if ranked is None else empty_predictions(ranked.num_images, min(ranked.num_classes, num_logits))
        first_batch = jnp.zeros((), jnp.int32)
        _, tally, is_incomplete = evaluate_split(
            model,
            settings,
            weights,
            infeed,
            first_token(),
            first_batch,
            num_batches,
            scale,
            start=empty_tally(num_logits if per_class else None, settings.evaluated_objective, rows),
        )
        return tally, is_incomplete

    with caching_compilations(subject.config.compilation_cache, notify):
        traced = trace_ahead(
            program, subject.weights, *_numbers(subject, source), platform=traced_platform(this_device())
        )
        check_batch_size(settings.evaluated_objective, model.outputs, notify)
        deterministic = subject.config.deterministic
        return call_on_worker(partial(compile_traced, traced, deterministic=deterministic, keeps=transport))


def _num_logits(
    model: CheckedModel, weights: Weights, subject: Subject, settings: CompiledSettings, source: EvaluationSource
) -> int:
    """Trace the model to find the number of classes, K, because a user-defined model does not declare it."""
    pixels = jax.ShapeDtypeStruct((source.batch, source.height, source.width), jnp.uint32)

    extents = None if whole_of(source) is None else jax.ShapeDtypeStruct((source.batch,), jnp.int32)

    def apply(weights: Weights, pixels: jax.Array, scale: PixelScale, extents: jax.Array | None) -> jax.Array:
        images = prepare_for_evaluation(settings.evaluated_augmentation, pixels, scale, extents)
        return logits_of(model.apply(weights.params, weights.batch_stats, images, train=False)[0])

    logits = jax.eval_shape(apply, weights, pixels, _numbers(subject, source)[1], extents)
    return logits.shape[1]


def _numbers(subject: Subject, source: EvaluationSource) -> tuple[jax.Array, PixelScale]:
    """Return the run-time arguments other than the weights; changing them requires no recompilation."""
    scale = PixelScale(mean=jnp.array(subject.mean, jnp.float32), std=jnp.array(subject.std, jnp.float32))
    return jnp.int32(source.num_batches), scale


def _launch(
    compiled: Compiled,
    subject: Subject,
    source: EvaluationSource,
    transport: Transport,
    infeed: BatchInfeed,
    board: ControlBoard,
) -> Tally:
    """Run the program to completion, and return the tally as NumPy arrays; if the host failed, raise its exception."""
    arguments = subject.weights, *_numbers(subject, source)
    with transport.running(), closing(infeed):
        infeed.start()
        try:
            tally, _ = call_on_worker(lambda: jax.tree.map(np.asarray, compiled.call(*arguments)))
        except BaseException:
            # There is nothing to save: return at once. The program, on its own thread, ends at its next pull.
            board.request_stop("the evaluation was abandoned")
            raise
    for end in (infeed, transport):
        if end.failure is not None:
            raise end.failure
    if isinstance(source, CheckedSource):
        source.check_unchanged()
    return tally
