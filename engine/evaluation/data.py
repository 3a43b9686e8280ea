"""Chooses the images that weights are evaluated on, and checks that the images fit the weights.

Owns the choice and the checks. Must not know: models, programs.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.data.dataset import (
    DATA_LOCATION,
    choose_data,
    data_of_record,
    make_demo,
    open_cache,
    open_cached_split,
)
from loopfeed.engine.data.drawn_images import SplitLabels, fold_of
from loopfeed.engine.data.eval_split import choose_eval_split, have_same_classes
from loopfeed.engine.data.label_fit import check_loss_fits
from loopfeed.engine.data.open_data import manifest_digest_of
from loopfeed.engine.feed.batches import ArrayBatches, EvaluationArrays, EvaluationSource, LabelKind
from loopfeed.engine.feed.shard_batches import SequentialBatches
from loopfeed.engine.owners import storage_options_of
from loopfeed.engine.records.imagenet import classes_or_imagenet
from loopfeed.engine.records.trained_run import TrainedRun
from loopfeed.engine.records.weights_metadata import classes_of
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.classes import ImageClass, lacking, places
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.reader import ShardSplit, list_splits, read_manifest


@dataclass(frozen=True)
class TrainedOn:
    """The known facts about the data that weights were trained on.

    Attributes:
        description: the name of the data in messages.
        manifest_digest, eval_manifest_digest: SHA-256 of the manifests of the training split and of the split used for
            evaluation during training; None if there was none.
        num_classes: the number of classes, K, of the weights; None if unknown.
        classes: the classes of the weights by label; empty if they are not recorded.
        location: where the run that trained them found the data; None if unknown.
        fold: the fold of the training split that they were not trained on; None if they were trained on all of it.
    """

    description: str
    manifest_digest: str | None
    eval_manifest_digest: str | None
    num_classes: int | None
    classes: tuple[ImageClass, ...] = ()
    location: str | None = None
    fold: str | None = None


def data_of_run(run: TrainedRun) -> TrainedOn:
    """Return what is known about the data that a run was trained on."""
    return TrainedOn(
        run.record.resolved["data"],
        run.record.manifest_digest,
        run.record.resolved.get("eval_manifest_sha256"),
        run.num_classes,
        classes_of(run.weights.metadata, os.fspath(run.path)),
        run.record.resolved.get(DATA_LOCATION),
        run.record.config.fold,
    )


@dataclass(frozen=True)
class EvaluationData:
    """An open evaluation set.

    Attributes:
        source: the source of its batches.
        description: its name in messages.
        classes: the classes by label, those of the weights if they are recorded; None for user-supplied images.
    """

    source: EvaluationSource
    description: str
    classes: tuple[ImageClass, ...] | None


def open_user(
    evaluation: EvaluationSource | EvaluationArrays, *, batch: int, num_classes: int | None, kind: LabelKind = "classes"
) -> EvaluationData:
    """Open a user-supplied evaluation set: either arrays, which are checked first, or a source of batches.

    Raises:
        ValueError: if the arrays are not pixels and labels of the classes, or a source has a different batch size.
    """
    if isinstance(evaluation, tuple):
        evaluation = ArrayBatches(*evaluation, batch=batch, num_classes=num_classes, kind=kind)
    return EvaluationData(evaluation, "images of your own", None)


def open_evaluation_split(
    config: TrainConfig,
    trained_on: TrainedOn,
    stack: ExitStack,
    notify: Callable[[str], None],
    *,
    has_user_loss: bool = False,
) -> EvaluationData:
    """Open the split that a run with these settings evaluates on, and register it with `stack`, which will close it.

    Args:
        config: the settings with the data and the split; each is chosen automatically if it is not set.
        trained_on: the data that the weights were trained on; other images cause a warning, other classes an error.
            Classes are compared by identifier if they are recorded: they may be fewer, and in another order.
        stack: the stack of open resources.
        notify: called with one-line messages.
        has_user_loss: whether a user-defined loss is computed, which takes any labels.

    Raises:
        ValueError: if there is no such split, or its classes do not fit the weights or the loss.
    """
    data = _choose(config, trained_on, notify)
    stored = storage_options_of(config)
    fold = trained_on.fold if config.eval_split is None else None
    name = choose_eval_split(config, data) if fold is None else config.split
    if name is None and (splits := list_splits(data, storage_options=stored)):
        raise ValueError(
            f"{data} has none of the usual evaluation splits: choose a split with --split ({', '.join(splits)})"
        )
    name = name or config.split  # if there is no split at all, opening this one raises the error
    split = open_cached_split(config, data, name, open_cache(config, data, notify), stack, notify)
    where = f"{data}/{name}"
    check_loss_fits(config, split.manifest, where, has_user_loss=has_user_loss)
    is_known = _compare(config, data, trained_on, split.manifest, name, notify)
    images, description = None, f"{where}, {quantity(split.num_images, 'image')}"
    if fold is not None:
        images = _images_of_fold(fold, trained_on, split, where, config.infeed_timeout_s)
        description = f"fold {fold} of {where}, {quantity(len(images), 'image')}"
    elif trained_on.fold is not None and manifest_digest_of(split.manifest) == trained_on.manifest_digest:
        held_out = len(_images_of_fold(trained_on.fold, trained_on, split, where, config.infeed_timeout_s))
        notify(
            f"{split.num_images - held_out:,} of the {quantity(split.num_images, 'image')} of {where} were trained on; "
            f"without --split, only those of fold {trained_on.fold} are evaluated, which were not"
        )
    classes = trained_on.classes
    if trained_on.manifest_digest is None:
        classes = classes_or_imagenet(classes, trained_on.num_classes, split.manifest.classes)
    if classes:
        label_of = _match_classes(split.manifest, where, classes, notify)
        source = SequentialBatches(split, batch=config.batch, label_of=label_of, images=images)
        return EvaluationData(source, description, classes)
    found, expected = split.manifest.num_classes, trained_on.num_classes
    if expected is not None and found != expected and not (is_known and found < expected):
        raise ValueError(
            f"the data must have {quantity(expected, 'class')}, as the weights do, but {where} has {found:,}: "
            "choose the data that the weights were trained for (--data)"
        )
    if trained_on.manifest_digest is None:
        notify("the weights do not record their classes: they are taken to be those of the data, in order")
    source = SequentialBatches(split, batch=config.batch, images=images)
    return EvaluationData(source, description, split.manifest.classes)


def _images_of_fold(
    fold: str, trained_on: TrainedOn, split: ShardSplit, where: str, timeout_s: float
) -> NDArray[np.int64]:
    """Return the images of the fold that a run did not train on, int64 [n].

    Raises:
        ValueError: the split is another one than the run's, of which the fold may have trained images.
    """
    if manifest_digest_of(split.manifest) != trained_on.manifest_digest:
        raise ValueError(
            f"fold {fold} is a part of the split that the run was trained on, but {where} is another one: "
            "choose a split to evaluate (--split)"
        )
    return fold_of(fold, SplitLabels(split, where, timeout_s))


def _match_classes(
    manifest: Manifest, where: str, classes: tuple[ImageClass, ...], notify: Callable[[str], None]
) -> NDArray[np.int32] | None:
    """Return the label in the weights of each class of a split, int32 [K]; None if the labels are the same.

    Raises:
        ValueError: the weights lack a class of the split, or the columns of several labels are in another order.
    """
    if (missing := lacking(manifest.classes, classes)) is not None:
        raise ValueError(
            f"the data must have only classes that the weights were trained for, but {where} has {missing} besides: "
            "choose other data (--data), or train on these first, with --init-from"
        )
    label_of = np.array(places(manifest.classes, classes), np.int32)
    if np.array_equal(label_of, np.arange(len(classes))):
        return None
    is_ordered = bool((np.diff(label_of) > 0).all())
    if manifest.targets is not None:
        raise ValueError(
            f"the labels must have the columns of the weights in their order, but {where} has "
            f"{'fewer' if is_ordered else 'another order'}: pack it with a file of labels that has the same columns"
        )
    order = "" if is_ordered else ", in another order"
    notify(
        f"classes: compared by identifier: {where} has {len(label_of):,} of the {quantity(len(classes), 'class')} of "
        f"the weights{order}"
    )
    return None if np.array_equal(label_of, np.arange(len(label_of))) else label_of


def _choose(config: TrainConfig, trained_on: TrainedOn, notify: Callable[[str], None]) -> str:
    if config.data is None and (config.synthetic or trained_on.manifest_digest is None):
        raise ValueError(
            f"the images to evaluate on must be given, because the weights were trained on {trained_on.description}: "
            "give --data DIR, or images of your own with --evaluation"
        )
    is_of_run = trained_on.location is not None
    choice = choose_data(data_of_record(config.data, trained_on.location) if is_of_run else config.data)
    if choice.is_demo:
        if not trained_on.description.startswith(choice.data):
            raise ValueError(
                f"the weights were trained on {trained_on.description}, which was not found in the current folder: "
                "give the images to evaluate on with --data DIR"
            )
        make_demo(Path(choice.data), notify)
    return choice.data


def _compare(
    config: TrainConfig, data: str, trained_on: TrainedOn, manifest: Manifest, name: str, notify: Callable[[str], None]
) -> bool:
    """Return whether a split is known to belong to the training data set; if not, warn that its classes may differ.

    There is no warning if the training data set is unknown.

    Raises:
        ValueError: if the split belongs to the data set, but its classes differ from those of the training split.
    """
    if trained_on.manifest_digest is None:
        return False
    if manifest_digest_of(manifest) in (trained_on.manifest_digest, trained_on.eval_manifest_digest):
        return True
    stored = storage_options_of(config)
    trained = None
    if config.split in list_splits(data, storage_options=stored):
        trained = read_manifest(open_location(data, storage_options=stored), config.split)
    if trained is None or manifest_digest_of(trained) != trained_on.manifest_digest:
        matter = (
            "classes are compared by identifier"
            if trained_on.classes
            else "the result is meaningful only if the classes are the same, in the same order"
        )
        notify(
            f"warning: {data}/{name} is not known to belong to the data that the weights were trained on "
            f"({trained_on.description}): {matter}"
        )
        return False
    if not trained_on.classes and not have_same_classes(trained, manifest):
        raise ValueError(
            f"the split must have the same classes as the training split, but {data}/{name} has different classes from "
            f"{data}/{config.split}: pack both splits from the same source, or choose another split (--split)"
        )
    return True
