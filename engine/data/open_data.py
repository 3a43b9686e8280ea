"""The opened data of a run: its batches, its evaluation split, and the properties of its images.

The only module that knows which data the settings select.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.config import OFF, OWN_BATCHES, SYNTHETIC_CLASSES, SYNTHETIC_IMAGE_SIZE, TrainConfig
from loopfeed.engine.data.class_weights import choose_class_weights
from loopfeed.engine.data.dataset import choose_data, make_demo, open_cache, open_cached_split
from loopfeed.engine.data.drawn_images import DrawnImages, SplitLabels, choose_drawn
from loopfeed.engine.data.eval_split import USUAL_EVAL_SPLITS, check_same_classes, choose_eval_split
from loopfeed.engine.data.label_fit import check_loss_fits, check_num_targets
from loopfeed.engine.feed.batches import (
    ArrayBatches,
    BatchSource,
    EvaluationSource,
    FunctionBatches,
    LabelKind,
    takes_rows,
    whole_of,
)
from loopfeed.engine.feed.resizable_batches import SyntheticBatches
from loopfeed.engine.feed.shard_batches import SequentialBatches, ShardBatches, WindowedBatches
from loopfeed.engine.parts import UserParts
from loopfeed.engine.processes import this_process
from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.extents import share_of_square
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.arrays import GROUPS, WEIGHTS
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.reader import ShardSplit
from loopfeed.preprocess.shards.shard_cache import ShardCache
from loopfeed.preprocess.shards.targets import TargetKind

# Used without a manifest; maps 0 … 255 to -2 … 2.
_UNKNOWN_MEAN = (0.5, 0.5, 0.5)
_UNKNOWN_STD = (0.25, 0.25, 0.25)


@dataclass(frozen=True)
class RunData:
    """The opened data of a run, as `open_data` returns them.

    Attributes:
        source: the source of training batches.
        description: the data in words, for messages.
        num_classes: K, None if only a user-defined model knows it.
        num_images: the draws of an epoch: N of the training split, or of what is drawn from it. None for an endless
            source of batches.
        evaluation: the source of evaluation batches, None without evaluation.
        mean, std: by which the pixels are normalised, per channel, on the scale 0 … 1: the settings, else those of
            the packed split.
        manifest_digest: SHA-256 of the training split's manifest, None without one.
        eval_manifest_digest: likewise for the evaluation split.
        contents_digest: SHA-256 of the images and labels of both splits in their order, whichever tools packed them and
            wherever they are; None without a pack, or if it has no checksums.
        location: the folder or URL of the packed data set, None without one.
        classes: the classes by label, or the columns of numbers, empty if they have no names.
        resize_rule: how the images were resized and cropped when they were packed, None if unknown.
        targets: whether each image of a packed split has several classes, or numbers; None if it has one class.
        digests: what identifies the images that are drawn, beside the settings and the manifest, by name.
        class_weights: the weights of the classes in the training loss, float32 [K]; None for none.
    """

    source: BatchSource
    description: str
    num_classes: int | None
    num_images: int | None = None
    evaluation: EvaluationSource | None = None
    mean: tuple[float, float, float] = _UNKNOWN_MEAN
    std: tuple[float, float, float] = _UNKNOWN_STD
    manifest_digest: str | None = None
    eval_manifest_digest: str | None = None
    contents_digest: str | None = None
    location: str | None = None
    classes: tuple[ImageClass, ...] = ()
    resize_rule: Mapping[str, int | str] | None = None
    targets: TargetKind | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    class_weights: NDArray[np.float32] | None = None


def open_data(
    config: TrainConfig,
    parts: UserParts,
    stack: ExitStack,
    notify: Callable[[str], None],
    *,
    first_batch: int = 0,
    is_new: bool = True,
) -> RunData:
    """Open the training and evaluation data of a run; the settings `steps` and `epochs` are not used.

    Args:
        config: the settings.
        parts: the user-defined parts.
        stack: closes what is opened.
        notify: called with a line of text about the choice of the data, and with warnings about the data.
        first_batch: index of the run's first batch, from 0.
        is_new: whether the run is new. A new run is refused while an evaluation split is still being packed: it would
            start without that split, and could not add it later.

    Raises:
        ValueError: settings and data do not fit together; the message names both.
    """
    if parts.batches is not None:
        data = _open_user_batches(config, parts, first_batch)
    elif config.synthetic:
        data = _synthesise(config)
    else:
        data = _open_packed(config, parts, stack, notify, first_batch=first_batch, is_new=is_new)
    data = replace(data, mean=config.mean or data.mean, std=config.std or data.std)
    evaluation = parts.evaluation
    if isinstance(evaluation, tuple):
        evaluation = ArrayBatches(
            *evaluation,
            batch=config.batch,
            num_classes=data.num_classes,
            kind=label_kind(config, has_user_loss=parts.loss is not None),
        )
    if evaluation is not None:
        data = replace(data, evaluation=evaluation)
    if data.evaluation is not None:
        _check_same_shape(data.source, data.evaluation)
    return data


def _check_same_shape(source: BatchSource, evaluation: EvaluationSource) -> None:
    shapes = [(each.batch, each.height, each.width) for each in (source, evaluation)]
    if whole_of(source) != whole_of(evaluation):
        raise ValueError(
            "the images of both splits must be whole pictures of one geometry, or squares, but --size, --resize and "
            f"--canvas of the training split gave {_geometry(source)}, and those of the evaluation split "
            f"{_geometry(evaluation)}: pack both splits alike, or give --eval-split off"
        )
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"evaluation batches must be shaped like training batches, B × H × W = {shapes[0]}, got {shapes[1]}: "
            "pack both splits with the same --size, or give --eval-split off"
        )


def _geometry(source: BatchSource) -> str:
    whole = whole_of(source)
    return (
        "squares" if whole is None else f"pictures of a shorter side of {whole.resize} px, cropped to {whole.size} px"
    )


def _open_user_batches(config: TrainConfig, parts: UserParts, first_batch: int) -> RunData:
    batches = parts.batches
    assert batches is not None
    how: dict[str, Any] = {
        "first_batch": first_batch,
        "num_classes": config.num_classes,
        "kind": label_kind(config, has_user_loss=parts.loss is not None),
    }
    function: Any = batches
    if not callable(batches):
        source: BatchSource = batches
    else:
        if takes_rows(batches):
            how |= {"rows": _user_rows(config.batch), "batch": config.batch}
        source = FunctionBatches(function, **how)
    if source.batch != config.batch:
        raise ValueError(
            f"the batch source must return batches of {quantity(config.batch, 'image')} (the setting batch), "
            f"got {source.batch}: "
            "change the setting or the source"
        )
    return RunData(source, OWN_BATCHES, config.num_classes)


def _user_rows(batch: int) -> range:
    """Return the rows of a batch that this process takes."""
    here = this_process()
    start, stop = (batch * number // here.count for number in (here.index, here.index + 1))
    return range(start, stop)


def label_kind(config: TrainConfig, *, has_user_loss: bool) -> LabelKind:
    """Return which labels the loss of a run takes."""
    if has_user_loss:
        return "any"
    return "classes" if config.loss == "cross-entropy" else "numbers"


def _synthesise(config: TrainConfig) -> RunData:
    size = config.image_size or SYNTHETIC_IMAGE_SIZE
    num_classes = config.num_classes or SYNTHETIC_CLASSES
    source = SyntheticBatches(batch=config.batch, height=size, width=size, num_classes=num_classes, seed=config.seed)
    return RunData(source, "synthetic batches", num_classes)


def _open_packed(
    config: TrainConfig,
    parts: UserParts,
    stack: ExitStack,
    notify: Callable[[str], None],
    *,
    first_batch: int,
    is_new: bool,
) -> RunData:
    choice, notify = choose_data(config.data), _once(notify)
    # The data of a resumed run may be those of its record.
    is_given = config.data is not None
    notify(f"data: {choice.data}" if is_given and not is_new else f"data: {choice.data} ({choice.reason})")
    if choice.is_demo:
        make_demo(Path(choice.data), notify)
    cache = open_cache(config, choice.data, notify)
    split = _open_split(config, choice.data, config.split, stack, cache, notify)
    where, manifest = f"{choice.data}/{config.split}", split.manifest
    if manifest.format_version == 1:
        notify(
            f"{choice.data} has format version 1, so training cannot detect swapped shard files: "
            "check them with `inspect-shards --verify`"
        )
    check_loss_fits(config, manifest, where, has_user_loss=parts.loss is not None)
    check_num_targets(config.num_classes, manifest, where)
    num_classes = _num_classes(config, manifest, where)
    labels = SplitLabels(split, where, config.infeed_timeout_s)
    drawn = choose_drawn(config, parts.indices, labels)
    weights = choose_class_weights(config, drawn, labels, num_classes)
    _warn_of_split(config, split, drawn.num_images, num_classes, where, notify)
    for message in filter(None, (*drawn.messages, weights.message)):
        notify(message)
    data = RunData(
        _order_batches(config, split, drawn, first_batch, stack, notify),
        f"{where}, {_describe_count(drawn.num_images, split.num_images)}",
        num_classes,
        drawn.num_images,
        mean=manifest.channel_mean,
        std=manifest.channel_std,
        manifest_digest=manifest_digest_of(manifest),
        contents_digest=_contents_digest(manifest),
        location=choice.data,
        classes=manifest.classes,
        resize_rule=manifest.resize_rule,
        targets=None if manifest.targets is None else manifest.targets.kind,
        digests={**drawn.digests, **weights.digests},
        class_weights=weights.values,
    )
    if drawn.held_out is not None:
        return data if config.eval_split == OFF else _with_fold(config, data, split, drawn.held_out)
    name = choose_eval_split(config, choice.data, is_new=is_new)
    if name is None:
        if is_new and config.eval_split is None and config.split not in USUAL_EVAL_SPLITS:
            notify(
                f"{choice.data} has no val or test split, so the run will not be evaluated: pack the images with "
                "--holdout 0.1, or hide this message with --eval-split off"
            )
        return data
    eval_split = _open_split(config, choice.data, name, stack, cache, notify)
    check_same_classes(manifest, eval_split.manifest, name)
    return replace(
        data,
        description=f"{data.description}; evaluated on {name}, {quantity(eval_split.num_images, 'image')}",
        evaluation=SequentialBatches(eval_split, batch=config.batch),
        eval_manifest_digest=manifest_digest_of(eval_split.manifest),
        contents_digest=_contents_digest(manifest, eval_split.manifest),
    )


def _with_fold(config: TrainConfig, data: RunData, split: ShardSplit, held_out: NDArray[np.int64]) -> RunData:
    """Return the data of a run that is evaluated on a fold of its training split."""
    return replace(
        data,
        description=f"{data.description}; evaluated on fold {config.fold}, {quantity(len(held_out), 'image')}",
        evaluation=SequentialBatches(split, batch=config.batch, images=held_out),
        eval_manifest_digest=data.manifest_digest,
    )


def _once(notify: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes each text on once, because both splits may give the same warning."""
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            said.add(text)
            notify(text)

    return say


def mixes_pairs(config: TrainConfig) -> bool:
    """Return whether the images at the rows 2k and 2k + 1 of a batch are mixed with each other."""
    return any(stage.mixup > 0 or stage.cutmix > 0 for stage in config.by_stage)


def _order_batches(
    config: TrainConfig,
    split: ShardSplit,
    drawn: DrawnImages,
    first_batch: int,
    stack: ExitStack,
    notify: Callable[[str], None],
) -> BatchSource:
    """Return the training batches of a split in the order that the settings name; `stack` closes their reader."""
    if config.order == "random":
        return ShardBatches(split, batch=config.batch, seed=config.seed, order=drawn.order)
    source = WindowedBatches(
        split,
        batch=config.batch,
        seed=config.seed,
        window_gb=config.window_gb,
        pairs=mixes_pairs(config),
        rows=_user_rows(config.batch),
        first_batch=first_batch,
        num_threads=config.reader_threads,
        timeout_s=config.infeed_timeout_s,
    )
    stack.callback(source.close)
    windows = quantity(source.order.num_windows, "window")
    notify(f"order: {windows} of up to {quantity(source.order.largest_window, 'image')} an epoch")
    return source


def _open_split(
    config: TrainConfig,
    data: str,
    name: str,
    stack: ExitStack,
    cache: ShardCache | None,
    notify: Callable[[str], None],
) -> ShardSplit:
    split = open_cached_split(config, data, name, cache, stack, notify)
    split.load_numbers(timeout_s=config.infeed_timeout_s)
    return split


def _num_classes(config: TrainConfig, manifest: Manifest, where: str) -> int:
    """Return the setting `num_classes` or, if it is not given, the number of classes in the data.

    `where` is the name of the split.

    Raises:
        ValueError: if the setting is less than the number of classes in the data.
    """
    num_classes = config.num_classes or manifest.num_classes
    if num_classes < manifest.num_classes:
        raise SettingError(
            "num_classes",
            "{setting} must be at least {least}, the number of classes in {where}, got {found}: leave it out to use "
            "that number",
            least=manifest.num_classes,
            where=where,
            found=num_classes,
        )
    return num_classes


def _describe_count(num_drawn: int, num_images: int) -> str:
    images = quantity(num_images, "image")
    return images if num_drawn == num_images else f"{num_drawn:,} of {images}"


def _warn_of_split(
    config: TrainConfig,
    split: ShardSplit,
    num_images: int,
    num_classes: int,
    where: str,
    notify: Callable[[str], None],
) -> None:
    """Warn about a training split that is allowed but probably not intended."""
    if num_classes == 1 and split.manifest.targets is None:
        notify(f"warning: {where} has only one class, so there is nothing to learn")
    largest = max(stage.batch for stage in config.by_stage)
    if largest > num_images:
        where = where if num_images == split.num_images else f"the part of {where} that is drawn"
        notify(
            f"warning: a batch has {largest:,} images, but {where} has only {num_images:,}, so each batch "
            f"repeats some of them: choose a batch of {num_images:,} or fewer"
        )
    if any(stage.crop == "resized" for stage in config.by_stage) and (
        share := share_of_square(split.manifest.resize_rule)
    ):
        notify(
            f"crops: from packed squares, which keep {100 * share:.0f} % of a 4:3 photograph; published accuracies "
            "crop whole pictures (preprocess-imagenet --canvas 3:2)"
        )


def _contents_digest(*manifests: Manifest) -> str | None:
    """Return the digest of the images, labels, weights and groups of splits, None if not all have checksums."""
    if not all(each.checksum_digests for each in manifests):
        return None
    lists = [
        (each.height, each.width, each.checksum_digests, each.label_digests)
        + ((each.whole, each.extent_digests) if each.is_whole else ())
        + tuple((name, each.column_digests[name]) for name in (WEIGHTS, GROUPS) if name in each.column_digests)
        for each in manifests
    ]
    return hashlib.sha256(json.dumps(lists).encode()).hexdigest()


def manifest_digest_of(manifest: Manifest) -> str:
    """Return the hexadecimal SHA-256 of a manifest, which identifies the data of a run."""
    return hashlib.sha256(manifest.to_json().encode()).hexdigest()
