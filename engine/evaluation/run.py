"""The steps of an evaluation outside a training run, from opening the images to returning the counts.

Owns the order of these steps; `loopfeed.engine.evaluation.counting` compiles and runs the program.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

import jax
import numpy as np

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.control.signals import StopSignals, ignore_message
from loopfeed.engine.crossing.pushed import mean_of_images
from loopfeed.engine.data.label_fit import check_labels_stay
from loopfeed.engine.data.open_data import label_kind
from loopfeed.engine.evaluation.counting import RankedClasses, predictions_of, run_evaluation
from loopfeed.engine.evaluation.data import EvaluationData, TrainedOn, data_of_run, open_evaluation_split, open_user
from loopfeed.engine.evaluation.result import ClassResult, EvaluationResult
from loopfeed.engine.evaluation.subject import (
    Channels,
    Subject,
    check_evaluated_parts,
    describe_weights_of,
    file_subject,
    read_weights_file,
    registry_name_of,
    run_subject,
    with_recorded_loss,
)
from loopfeed.engine.feed.batches import EvaluationArrays, EvaluationSource, label_form_of
from loopfeed.engine.feed.shard_batches import SequentialBatches
from loopfeed.engine.objective.losses import Loss
from loopfeed.engine.objective.metrics import Metric, PerExample
from loopfeed.engine.objective.tally import Tally, count_top5
from loopfeed.engine.owners import OF_AN_EVALUATION, storage_options_of
from loopfeed.engine.parts import NO_PARTS, UserParts
from loopfeed.engine.program.train_state import TrainModel
from loopfeed.engine.records.trained_run import reading_run
from loopfeed.engine.records.weights_metadata import classes_of, num_classes_in
from loopfeed.engine.settings import SettingError
from loopfeed.engine.stream.sinks import EvaluationRecord
from loopfeed.models.torchvision_names import num_classes_of


def evaluate(
    run: str | os.PathLike[str] | TrainConfig,
    *,
    model: TrainModel | None = None,
    evaluation: EvaluationSource | EvaluationArrays | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric | PerExample] | None = None,
    per_class: bool = False,
    notify: Callable[[str], None] = lambda _: None,
    snapshot: int | Literal["best"] | None = None,
    predictions: bool = False,
) -> EvaluationResult:
    """Evaluate the weights of a run in the same way as the run's training loop did.

    The run can still be in progress: without weights, those of its newest snapshot are evaluated.

    With the run's batch size, the counts and the loss equal those of its last evaluation, bit for bit on a CPU. With a
    different batch size, sums are computed in a different order: the loss may differ in its last digits, and a count
    may differ if two logits differ only in theirs.

    Args:
        run: the folder or URL of the run, or its settings, possibly changed (`loopfeed.run_settings` reads them). Of
            the settings, `run_dir` is the folder, and data, eval_split, batch, image_size or eval_image_size,
            eval_mirror, precision, kernels and those of the infeed take effect. Another `image_size` than the run's is
            the one to evaluate at.
        model: your own model, if the run trained one.
        evaluation: your own images instead of a split: (uint32 [N, H, W] packed pixels, integer [N] labels), or an
            `EvaluationSource`.
        loss: your own loss, if the run trained with one.
        metrics: your own metrics, whether or not the run computed them, as for `loopfeed.train`.
        per_class: also count each class separately.
        notify: called with one-line messages about the weights and the images.
        snapshot: the step of the snapshot to evaluate, instead of the weights that the run wrote at its end; "best" is
            the kept one with the best evaluation by `keep_best`, else by top-1 or, without it, by the loss.
        predictions: also return the decision on each image; the labels must be class numbers.

    Raises:
        ValueError: if the run, its weights, the model and the data do not fit together, before any batch is read.
        KeyboardInterrupt: on SIGINT, SIGTERM or SIGHUP, if the caller is the main thread.
        BaseException: whatever the source of batches raised, or `FeederError` if a batch did not arrive in time.

    Example:
        >>> result = evaluate("run", model=model, per_class=True)
        >>> result.record.top1, [each.num_images for each in result.classes]
        (1.0, [4, 4])
    """
    place = _folder_of(run)
    options = storage_options_of(run) if isinstance(run, TrainConfig) else None
    with reading_run(place, snapshot, notify, storage_options=options) as (recorded, notify):
        config = run if isinstance(run, TrainConfig) else recorded.config
        if config is not run and (
            line := recorded.record.describe_replaced(config, OF_AN_EVALUATION, OF_AN_EVALUATION)
        ):
            notify(line)
        parts = UserParts(model=model, loss=loss, metrics=metrics, evaluation=evaluation)
        trained_on = data_of_run(recorded)
        has_data = config.data is not None or (trained_on.manifest_digest is not None and not config.synthetic)
        check_evaluated_parts(recorded, parts, has_data=has_data)
        board = ControlBoard()
        with StopSignals(board, ignore_message), ExitStack() as stack:
            if evaluation is not None:
                kind = label_kind(config, has_user_loss=loss is not None)
                data = open_user(evaluation, batch=config.batch, num_classes=recorded.num_classes, kind=kind)
            else:
                data = open_evaluation_split(config, trained_on, stack, notify, has_user_loss=loss is not None)
            subject = run_subject(recorded, config, model, data.source, notify)
            describe_weights_of(recorded, notify, is_chosen=snapshot is not None)
            return _count(subject, data, board, parts, per_class=per_class, predictions=predictions, notify=notify)


def evaluate_weights(
    path: str | os.PathLike[str],
    config: TrainConfig,
    *,
    model: TrainModel | None = None,
    mean: Channels | None = None,
    std: Channels | None = None,
    per_class: bool = False,
    notify: Callable[[str], None] = lambda _: None,
    predictions: bool = False,
) -> EvaluationResult:
    """Evaluate weights from any source, such as torchvision, on a packed split.

    Args:
        path: the path of a safetensors file or a state dictionary saved by PyTorch, with torchvision's names and
            layouts; or whatever else the setting `init_from` takes.
        config: of its settings, model (a registry name; "auto" uses the name in the file), loss (cross-entropy uses the
            one that the file records), data, eval_split, batch, image_size, eval_mirror, precision, kernels and those
            of the infeed take effect.
        model: your own model, if a run wrote the file for one.
        mean, std: of each channel on the scale 0 … 1; None uses those of the file or, without them, ImageNet's.
        per_class: also count each class separately.
        notify: called with one-line messages about the weights and the images.
        predictions: also return the decision on each image.

    Raises:
        ValueError, KeyboardInterrupt, BaseException: as in `evaluate`.
    """
    file = os.fspath(path)
    stored = read_weights_file(file, config, notify, storage_options_of(config), is_of_registry=model is None)
    name = None if model is not None else registry_name_of(file, stored, config)
    config = with_recorded_loss(config, stored.metadata, file)
    board = ControlBoard()
    with StopSignals(board, ignore_message), ExitStack() as stack:
        num_classes = num_classes_in(stored.metadata) if name is None else num_classes_of(name, stored.tensors)
        trained_on = TrainedOn("unknown images", None, None, num_classes, classes_of(stored.metadata, file))
        data = open_evaluation_split(config, trained_on, stack, notify)
        subject = file_subject(file, stored, config, data.source, mean, std, notify, model=model)
        notify(f"weights: {file}, {subject.name}" + (" (no digest: unchecked)" if stored.digest is None else ""))
        return _count(subject, data, board, NO_PARTS, per_class=per_class, predictions=predictions, notify=notify)


def _folder_of(run: str | os.PathLike[str] | TrainConfig) -> str | os.PathLike[str]:
    if not isinstance(run, TrainConfig):
        return run
    if run.run_dir is None:
        raise SettingError(
            "run_dir", "the setting {setting} must be the folder of the run, got None: set it in TrainConfig(run_dir=…)"
        )
    return run.run_dir


def _count(
    subject: Subject,
    data: EvaluationData,
    board: ControlBoard,
    parts: UserParts,
    *,
    per_class: bool,
    predictions: bool,
    notify: Callable[[str], None],
) -> EvaluationResult:
    """Compile and run the evaluation, and return its result."""
    notify(f"images: {data.description}")
    check_labels_stay(subject.config, label_form_of(data.source), is_trained=False)
    if (predictions or per_class) and label_form_of(data.source) is not None:
        what = "predictions" if predictions else "results per class"
        raise ValueError(f"{what} can be returned only for images whose labels are class numbers: leave them out")
    source, images, names = data.source, None, None
    if predictions and isinstance(source, SequentialBatches):
        # Before the evaluation, which damaged names would make in vain.
        images = source.images_in(0, source.num_images)
        names = source.split.names(images)
    ranked = RankedClasses(1, source.num_batches * source.batch) if predictions else None
    counted = run_evaluation(subject, source, board, parts, per_class=per_class, ranked=ranked, notify=notify)
    tally, found = counted.tally, predictions_of(counted.tally)
    if found is not None:
        found = replace(found, names=None if names is None else tuple(names), images=images)
    num_images = int(tally.num_images)
    num_top1, num_top5 = (None if each is None else int(each) for each in (tally.top1, tally.top5))
    num_top5 = count_top5(num_top5)
    finish = jax.jit(counted.settings.evaluated_objective.finish_metrics)
    return EvaluationResult(
        record=EvaluationRecord(
            step=subject.step,
            num_images=num_images,
            top1=mean_of_images(num_top1, num_images),
            top5=mean_of_images(num_top5, num_images),
            loss=mean_of_images(float(tally.loss_sum), num_images),
            time=time.time(),
            metrics={name: np.asarray(value).tolist() for name, value in finish(tally.metrics).items()},
        ),
        num_top1=num_top1,
        num_top5=num_top5,
        classes=_class_results(tally, data),
        data=data.description,
        is_mirrored=subject.config.eval_mirror,
        compile_s=counted.compiled.compile_s,
        from_cache=counted.compiled.from_cache,
        evaluate_s=counted.evaluate_s,
        wait_s=counted.wait_s,
        predictions=found,
    )


def _class_results(tally: Tally, data: EvaluationData) -> tuple[ClassResult, ...]:
    if tally.classes is None:
        return ()
    counts = zip(tally.classes.num_images.tolist(), tally.classes.top1.tolist(), strict=True)
    results = []
    for label, (num_images, num_top1) in enumerate(counts):
        named = None if data.classes is None or label >= len(data.classes) else data.classes[label]
        identifier, name = (str(label), str(label)) if named is None else (named.id, named.name)
        results.append(ClassResult(identifier, name, num_images, num_top1))
    return tuple(results)
