"""From settings to the things that they stand for: the data opened, the model built, defaults filled in.

The only place that knows which settings depend on which data.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from engine.config import SYNTHETIC_CLASSES, SYNTHETIC_IMAGE_SIZE, TrainConfig
from engine.feed.batches import (
    ArrayBatches,
    BatchFunction,
    BatchSource,
    EvaluationArrays,
    EvaluationSource,
    FunctionBatches,
    SyntheticBatches,
)
from engine.feed.shard_batches import SequentialBatches, ShardBatches
from engine.program.train_state import TrainModel
from engine.run.dataset import choose_data, make_demo
from models.model import Model
from models.registry import build_model, model_names
from preprocess.shards.manifest import Manifest
from preprocess.shards.reader import open_split
from preprocess.shards.splits import SplitNames, find_splits

_OWN_BATCHES = "batches of your own"
_USUAL_EVAL_SPLITS = ("val", "test")
# Optimisers whose updates are as large as the rate, whatever the gradient; lars, too, is used with rates like sgd's.
_SMALL_RATES = ("adamw", "lamb")
# Without a manifest nothing is known of the pixels: 0 … 255 then becomes -2 … 2.
_UNKNOWN_MEAN = (0.5, 0.5, 0.5)
_UNKNOWN_STD = (0.25, 0.25, 0.25)


@dataclass(frozen=True)
class Resolved:
    """What a run consists of.

    Attributes:
        source: of its batches.
        evaluation: of the batches that it is evaluated on, None without evaluation.
        model: to train.
        model_name: for people: the registry's, or that of the user's own.
        registry_name: the registry's, None for a model of the user's own.
        data: in words, for the first lines of the run.
        num_classes: K, None where the user's own model alone knows.
        mean, std: of each channel on the scale 0 … 1.
        manifest_digest: sha256 of the data's manifest, None where there is none.
        eval_manifest_digest: likewise of what it is evaluated on.
    """

    source: BatchSource
    evaluation: EvaluationSource | None
    model: TrainModel
    model_name: str
    registry_name: str | None
    data: str
    num_classes: int | None
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    manifest_digest: str | None
    eval_manifest_digest: str | None

    def to_json(self) -> dict[str, Any]:
        """Gives what `config.json` records beside the settings."""
        return {
            "model": self.model_name,
            "data": self.data,
            "num_classes": self.num_classes,
            "height": self.source.height,
            "width": self.source.width,
            "mean": self.mean,
            "std": self.std,
            "eval_manifest_sha256": self.eval_manifest_digest,
            "num_eval_batches": self.evaluation.num_batches if self.evaluation else 0,
        }


def own_parts(recorded: Mapping[str, Any]) -> tuple[str, ...]:
    """Tells which of "model" and "batches" were the user's own in a run, by its recorded `Resolved.to_json()`."""
    is_own = {"model": recorded.get("model") not in model_names(), "batches": recorded.get("data") == _OWN_BATCHES}
    return tuple(name for name, is_so in is_own.items() if is_so)


@dataclass(frozen=True)
class _OpenData:
    source: BatchSource
    data: str
    num_classes: int | None
    evaluation: EvaluationSource | None = None
    mean: tuple[float, float, float] = _UNKNOWN_MEAN
    std: tuple[float, float, float] = _UNKNOWN_STD
    manifest_digest: str | None = None
    eval_manifest_digest: str | None = None


def resolve(
    config: TrainConfig,
    stack: ExitStack,
    notify: Callable[[str], None],
    *,
    model: TrainModel | None = None,
    batches: BatchFunction | BatchSource | None = None,
    evaluation: EvaluationSource | EvaluationArrays | None = None,
    first_pull: int = 0,
) -> Resolved:
    """Opens the data and builds the model; `stack` closes what was opened.

    Args:
        config, notify, model, batches, evaluation: as `engine.run.train.train` takes them.
        stack: closes what is opened.
        first_pull: that the run begins with, from 0.

    Raises:
        ValueError: where settings and data do not fit together, naming both.
    """
    _check_arguments(config, model, batches)
    if batches is not None:
        opened = _own_batches(config, batches, first_pull)
    elif config.synthetic:
        opened = _synthetic(config)
    else:
        opened = _packed(config, stack, notify)
    source = opened.source
    if isinstance(evaluation, tuple):
        evaluation = ArrayBatches(*evaluation, batch=config.batch, num_classes=opened.num_classes)
    evaluation = evaluation or opened.evaluation
    if evaluation is None and config.stop_at_top1 is not None:
        raise ValueError(
            f"stop_at_top1 needs images to evaluate on, and there are none with {opened.data}, got "
            f"{config.stop_at_top1}: leave it out, or name the split (--eval-split)"
        )
    if evaluation is not None:
        _check_same_shape(source, evaluation)
    if config.image_size is not None and config.image_size > min(source.height, source.width):
        raise ValueError(
            f"image_size must be at most that of the data, {source.height} × {source.width} px, got "
            f"{config.image_size}: leave it out, or pack the data at that --size"
        )
    registry_name = None
    if model is None:
        built = _build(config, opened)
        model, registry_name = built, built.name
    return Resolved(
        source,
        evaluation,
        model,
        getattr(model, "name", type(model).__name__),
        registry_name,
        opened.data,
        opened.num_classes,
        opened.mean,
        opened.std,
        opened.manifest_digest,
        opened.eval_manifest_digest,
    )


def _check_settings(config: TrainConfig) -> None:
    """Raises ValueError where a setting would do something other than its name says."""
    if config.cycle_momentum and config.schedule != "one-cycle":
        raise ValueError(
            f"cycle_momentum goes with the schedule one-cycle, got {config.schedule}: change one of the two "
            "(--no-cycle-momentum)"
        )


def check_beginning(
    config: TrainConfig, notify: Callable[[str], None], *, own_batches: bool, own_evaluation: bool
) -> None:
    """Looks, where a run begins and not where it goes on, for what is hardly meant.

    Args:
        config: the settings.
        notify: told in words of what is right and surprises.
        own_batches, own_evaluation: whether these are the user's own.

    Raises:
        ValueError: where the split to evaluate on was not packed to its end. The run would be without it, or with
            another, and could not go on with it once it is.
    """
    is_evaluated = own_evaluation
    if not own_batches and not config.synthetic:
        choice = choose_data(config.data)
        if config.eval_split is None:
            splits = find_splits(choice.data)
            chosen = _usual_eval_split(config, choice.data, splits)
            _check_none_is_unfinished(config, choice.data, chosen, splits)
        else:
            chosen = choose_eval_split(config, choice.data)
        # The demo set may still have to be made.
        is_evaluated |= choice.is_demo or chosen is not None
    if config.eval_every_steps and not is_evaluated:
        notify(f"warning: there is nothing to evaluate on; --eval-every {config.eval_every_steps} changes nothing")
    if 0 < config.steps <= config.warmup_steps:
        notify(
            f"warning: the warm-up of {config.warmup_steps:,} steps does not end before the run, of {config.steps:,}, "
            "does: the learning rate stays below its peak"
        )
    if config.learning_rate is None and config.optimizer in _SMALL_RATES:
        notify(
            f"warning: the default learning rate of {config.peak_learning_rate:.2g} is one for sgd, and "
            f"{config.optimizer} mostly wants about 0.001: --learning-rate"
        )


def _check_none_is_unfinished(config: TrainConfig, data: str, chosen: str | None, splits: SplitNames) -> None:
    """Raise ValueError where a usual split that goes before the chosen one is unfinished, or has lost its manifest."""
    missing = {*takewhile(lambda name: name != chosen, (name for name in _USUAL_EVAL_SPLITS if name != config.split))}
    if found := missing.intersection(splits.unfinished):
        raise ValueError(
            f"the split to evaluate on must be complete, and the packing of {data.rstrip('/')}/{min(found)} was begun "
            "and not finished: run the same preprocess-imagenet command again, or give --eval-split, another or off"
        )


def _check_arguments(config: Any, model: Any, batches: Any) -> None:
    """Raises ValueError where an argument is of another kind, or where one makes another's setting meaningless."""
    if not isinstance(config, TrainConfig):
        raise ValueError(f"the settings must be a TrainConfig, got {type(config).__name__}: TrainConfig(steps=…)")
    _check_settings(config)
    if model is not None:
        if not callable(getattr(model, "init", None)) or not callable(getattr(model, "apply", None)):
            raise ValueError(
                f"a model must have the functions init and apply, got {type(model).__name__}: "
                "one of the registry goes by its name, TrainConfig(model=…)"
            )
        if config.model != "auto":
            raise ValueError(f"the setting model must be left out with a model of your own, got {config.model!r}")
        if config.precision != "float32":
            raise ValueError(
                f"the setting precision must be float32 with a model of your own, got {config.precision!r}: "
                "leave it out, and cast inside the model's apply"
            )
    if batches is not None:
        if not callable(batches) and not hasattr(batches, "fill"):
            raise ValueError(
                f"batches must be a function from the step to (pixels, labels), or a BatchSource; "
                f"got {type(batches).__name__}, which cannot be asked for a step again"
            )
        for name in ("data", "synthetic"):
            if value := getattr(config, name):
                raise ValueError(f"the setting {name} must be left out with batches of your own, got {value!r}")


def _check_same_shape(source: BatchSource, evaluation: EvaluationSource) -> None:
    shapes = [(each.batch, each.height, each.width) for each in (source, evaluation)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"evaluation batches must have the shape of training batches, B × H × W = {shapes[0]}, got {shapes[1]}: "
            "pack both splits alike, or give --eval-split off"
        )


def _build(config: TrainConfig, opened: _OpenData) -> Model:
    """Builds the registry's model for the data; "auto" becomes the name of what it stands for."""
    if opened.num_classes is None:
        raise ValueError("num_classes must be given with batches of your own and a model of the registry, got None")
    size = config.image_size or min(opened.source.height, opened.source.width)
    return build_model(config.model, num_classes=opened.num_classes, image_size=size, dtype=config.precision)


def _own_batches(config: TrainConfig, batches: BatchFunction | BatchSource, first_pull: int) -> _OpenData:
    source = (
        FunctionBatches(batches, first_index=first_pull, num_classes=config.num_classes)
        if callable(batches)
        else batches
    )
    if source.batch != config.batch:
        raise ValueError(
            f"every batch must hold the {config.batch} images of the setting batch, "
            f"the batch source gives {source.batch}: change one of the two"
        )
    return _OpenData(source, _OWN_BATCHES, config.num_classes)


def _synthetic(config: TrainConfig) -> _OpenData:
    size = config.image_size or SYNTHETIC_IMAGE_SIZE
    num_classes = config.num_classes or SYNTHETIC_CLASSES
    source = SyntheticBatches(batch=config.batch, height=size, width=size, num_classes=num_classes, seed=config.seed)
    return _OpenData(source, "synthetic batches", num_classes)


def _packed(config: TrainConfig, stack: ExitStack, notify: Callable[[str], None]) -> _OpenData:
    choice = choose_data(config.data)
    notify(f"data: {choice.data} ({choice.reason})")
    if choice.is_demo:
        make_demo(Path(choice.data), notify)
    split = stack.enter_context(open_split(choice.data, config.split))
    split.load_numbers(timeout_s=config.infeed_timeout_s)
    manifest = split.manifest
    if manifest.format_version == 1:
        notify(
            f"{choice.data} was packed before shard files were told apart while they are read: "
            "`inspect-shards --verify` notices files in each other's place"
        )
    num_classes = config.num_classes or manifest.num_classes
    if num_classes < manifest.num_classes:
        raise ValueError(
            f"num_classes must be at least the {manifest.num_classes} of {choice.data}/{config.split}, "
            f"got {num_classes}: leave it out to take the data's"
        )
    if num_classes == 1:
        notify(f"warning: {choice.data}/{config.split} has one class alone, in which there is nothing to learn")
    data = f"{choice.data}/{config.split}, {split.num_images:,} images"
    if config.batch > split.num_images:
        notify(
            f"warning: a batch is to have {config.batch:,} images and {choice.data}/{config.split} has "
            f"{split.num_images:,}, some of which come in it more than once: --batch {split.num_images} or "
            "less has each once"
        )
    evaluation, eval_digest = None, None
    if (name := choose_eval_split(config, choice.data)) is not None:
        eval_split = stack.enter_context(open_split(choice.data, name))
        eval_split.load_numbers(timeout_s=config.infeed_timeout_s)
        _check_same_classes(manifest, eval_split.manifest, name)
        evaluation = SequentialBatches(eval_split, batch=config.batch)
        eval_digest = manifest_digest_of(eval_split.manifest)
        data += f"; evaluated on {name}, {eval_split.num_images:,} images"
    return _OpenData(
        ShardBatches(split, batch=config.batch, seed=config.seed),
        data,
        num_classes,
        evaluation,
        manifest.channel_mean,
        manifest.channel_std,
        manifest_digest_of(manifest),
        eval_digest,
    )


def manifest_digest_of(manifest: Manifest) -> str:
    """Gives the SHA-256 by which a run tells its data, in hexadecimal."""
    return hashlib.sha256(manifest.to_json().encode()).hexdigest()


def choose_eval_split(config: TrainConfig, data: str) -> str | None:
    """Gives the split that was named, else the first of the usual ones that the data has and that is not trained on."""
    if config.eval_split == "off":
        return None
    if config.eval_split is not None:
        return config.eval_split
    return _usual_eval_split(config, data, find_splits(data))


def _usual_eval_split(config: TrainConfig, data: str, splits: SplitNames) -> str | None:
    for name in _USUAL_EVAL_SPLITS:
        if name == config.split:
            continue
        if name in splits.broken:
            raise ValueError(
                f"the split to evaluate on must have its manifest.json, and {data.rstrip('/')}/{name} has lost it: "
                "restore that file, or name another split to evaluate on (--eval-split; off for none)"
            )
        if name in splits.complete:
            return name
    return None


def _check_same_classes(train: Manifest, evaluation: Manifest, name: str) -> None:
    if [each.id for each in train.classes] != [each.id for each in evaluation.classes]:
        raise ValueError(
            f"the evaluation split must have the classes of the training split, and {name} has others: "
            "pack both from one source, or give --eval-split off"
        )
