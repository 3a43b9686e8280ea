"""Preparation of a run: checking its arguments, building its model for the data, and warning about odd settings."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from loopfeed.engine.config import (
    NATURAL,
    NO_CLASS_WEIGHTS,
    SETTINGS,
    TrainConfig,
    check_stages,
    describe_value,
)
from loopfeed.engine.data.label_fit import check_labels_stay, unmoved_labels_warning
from loopfeed.engine.data.open_data import RunData
from loopfeed.engine.feed.batches import HasSize, image_shape, label_form_of, largest_size, whole_of
from loopfeed.engine.objective.best_metric import parse_metric
from loopfeed.engine.objective.metrics import as_metrics
from loopfeed.engine.objective.objective import Objective
from loopfeed.engine.parts import UserParts, check_parts
from loopfeed.engine.program.train_state import TrainModel
from loopfeed.engine.settings import SettingError
from loopfeed.models.model import Model
from loopfeed.models.registry import UnknownModelError, build_model
from loopfeed.preprocess.quantities import quantity

DEFAULT_STOP_METRIC = "loss"
# Settings that have an effect only together with another one.
_USED_WITH = {
    **{"window_gb": "order", "cache_gb": "cache", "stop_metric": "stop_patience"},
    **{"profile_steps": "profile", "profile_format": "profile"},
}
# Optimisers whose updates have the size of the learning rate, whatever the gradient; lars uses rates like those of sgd.
_SMALL_RATE_OPTIMIZERS = ("adamw", "lamb", "adam", "lion", "muon")


def choose_model(config: TrainConfig, parts: UserParts, data: RunData) -> TrainModel:
    """Return the model to train on the data, the user's or one of the registry.

    Raises:
        ValueError: settings and data do not fit together; the message names both.
    """
    source = data.source
    if data.evaluation is None and config.stop_at_top1 is not None:
        raise SettingError(
            "stop_at_top1",
            "{setting} must not be given if the data ({data}) have no images to evaluate on, got {value}: leave it "
            "out, or choose data with images for it ({eval_split})",
            data=data.description,
            value=config.stop_at_top1,
        )
    if config.stop_at_top1 is not None and data.evaluation is not None and label_form_of(data.evaluation) is not None:
        raise SettingError(
            "stop_at_top1",
            "{setting} needs images with one class each, because others have no top-1 accuracy, got {value}: leave it "
            "out",
            value=config.stop_at_top1,
        )
    _check_labels_stay(config, data)
    for name, images in (("image_size", source), ("eval_image_size", data.evaluation or source)):
        size = getattr(config, name)
        if size is not None and size > largest_size(images):
            raise too_large_image(name, size, images)
    return _build(config, data) if parts.model is None else parts.model


def _check_labels_stay(config: TrainConfig, data: RunData) -> None:
    check_labels_stay(config, label_form_of(data.source), _columns(data))
    if data.evaluation is not None:
        check_labels_stay(config, label_form_of(data.evaluation), is_trained=False)


def _columns(data: RunData) -> list[str]:
    return [each.id for each in data.classes] if data.targets == "numbers" else []


def check_arguments(config: Any, parts: UserParts) -> None:
    """Check the arguments before anything is opened.

    Raises:
        ValueError: an argument has the wrong type, or a user-defined part makes a setting meaningless.
    """
    if not isinstance(config, TrainConfig):
        remedy = "TrainConfig(**settings)" if isinstance(config, Mapping) else "TrainConfig(steps=…)"
        raise ValueError(f"the settings must be a TrainConfig, got {type(config).__name__}: give {remedy}")
    if config.append_epochs is not None and not config.resume:
        raise SettingError(
            "append_epochs",
            "{setting} appends to a complete run, got {found:g} for a new one: give {resume} and {run_dir}",
            found=config.append_epochs,
        )
    if config.cycle_momentum and config.schedule != "one-cycle":
        raise SettingError(
            "cycle_momentum",
            "{setting} needs the one-cycle schedule, got {found}: change the schedule, or turn {setting} off",
            found=config.schedule,
        )
    if config.batch_norm_sync and config.batch_norm_group not in (None, config.batch):
        raise SettingError(
            "batch_norm_group",
            "{batch_norm_sync} averages over all {count} images of a batch, got {setting} {group}: leave one out",
            count=config.batch,
            group=config.batch_norm_group,
        )
    _check_is_packed(config, parts)
    _check_best_metrics(config, parts.metrics)
    check_parts(config, parts)
    if config.stages is not None:
        check_stages(config, partial(check_parts, parts=parts))


# Settings that need the labels of a packed split, and their values without an effect.
_OF_A_SPLIT = {"sampling": NATURAL, "fold": None, "class_weights": NO_CLASS_WEIGHTS}


def _check_is_packed(config: TrainConfig, parts: UserParts) -> None:
    """Raise SettingError if a setting needs the labels of a packed split, and there is none."""
    for name, default in _OF_A_SPLIT.items():
        if (config.synthetic or parts.batches is not None) and (found := getattr(config, name)) != default:
            raise SettingError(
                name,
                "{setting} needs the labels of a packed data set, got {found!r} with other batches: leave it "
                "out, or give {data}",
                found=found,
            )


def settle_stop_metric(config: TrainConfig) -> TrainConfig:
    """Return the settings with what `stop_patience` compares; recorded, because a resume may change `keep_best`."""
    if config.stop_patience is None or config.stop_metric is not None:
        return config
    return replace(config, stop_metric=config.keep_best or DEFAULT_STOP_METRIC)


def _check_best_metrics(config: TrainConfig, metrics: Any) -> None:
    """Raise SettingError if a setting that compares evaluations does not name a metric of the run."""
    for name, text in _best_metrics(config).items():
        try:
            metric = parse_metric(text)
        except ValueError as error:
            raise SettingError(name, "the setting {setting}: {error}", error=error) from None
        if metric.is_own and (not isinstance(metrics, Mapping) or metric.name not in metrics):
            raise SettingError(
                name,
                "{setting} must name a metric of the run, got {found!r}, which is neither top1, top5, loss nor a "
                "metric of your own: give that metric (--metrics, or train(…, metrics=…)), or choose another",
                found=metric.name,
            )


def _best_metrics(config: TrainConfig) -> dict[str, str]:
    """Return the settings that are given and compare evaluations, and what each compares."""
    given = {"keep_best": config.keep_best, "stop_metric": config.stop_metric}
    return {name: text for name, text in given.items() if text is not None}


def check_best_metrics(config: TrainConfig, parts: UserParts, data: RunData) -> None:
    """Raise SettingError if no evaluation of the run would have a number that a setting compares."""
    if config.stop_patience is not None:
        _check_patience(config, data)
    for name, text in _best_metrics(config).items():
        _check_best_metric(name, text, parts, data)


def _check_patience(config: TrainConfig, data: RunData) -> None:
    if data.evaluation is None:
        raise SettingError(
            "stop_patience",
            "{setting} needs images to evaluate on, but the data ({data}) have none, got {found}: leave it out, or "
            "choose data with images for it ({eval_split})",
            data=data.description,
            found=config.stop_patience,
        )
    if not config.eval_every_steps:
        raise SettingError(
            "stop_patience",
            "{setting} needs evaluations before the end of the run, got {found} with an evaluation at the end alone: "
            "leave it out, or say how often to evaluate ({eval_every_steps})",
            found=config.stop_patience,
        )


def _check_best_metric(name: str, text: str, parts: UserParts, data: RunData) -> None:
    """Raise SettingError if no evaluation would have the number that the setting `name` compares."""
    metric = parse_metric(text)
    if data.evaluation is None:
        raise SettingError(
            name,
            "{setting} needs images to evaluate on, but the data ({data}) have none, got {found!r}: leave it out, or "
            "choose data with images for it ({eval_split})",
            data=data.description,
            found=text,
        )
    if metric.name in ("top1", "top5") and label_form_of(data.evaluation) is not None:
        raise SettingError(
            name,
            "{setting} needs images with one class each for {found}, because others have no such accuracy: choose "
            "loss or a metric of your own",
            found=metric.name,
        )
    if metric.name == "top5" and parts.model is None and (data.num_classes or 0) < 6:
        raise SettingError(
            name,
            "{setting} needs at least six classes for top5, got {count}: choose top1",
            count=data.num_classes,
        )
    if metric.is_own and metric.name not in Objective(metrics=as_metrics(parts.metrics)).step_metrics:
        raise SettingError(
            name,
            "{setting} must name a metric that is one number, got {found!r}, which is an array: choose another, or "
            "define one that is a number",
            found=metric.name,
        )


def warn_of_settings(
    config: TrainConfig, data: RunData, notify: Callable[[str], None], *, has_user_loss: bool = False
) -> None:
    """Warn about settings of a new run that are allowed but probably not intended."""
    _warn_of_labels(config, data, notify, has_user_loss=has_user_loss)
    if config.eval_every_steps and data.evaluation is None:
        notify(f"warning: there is no data to evaluate on; --eval-every {config.eval_every_steps} has no effect")
    is_windowed = config.order == "windowed"
    if is_windowed and data.location is None:
        notify("warning: --order windowed applies to packed data sets; it has no effect on other batches")
    for name, needed in _USED_WITH.items():
        is_used = is_windowed if needed == "order" else getattr(config, needed)
        if getattr(config, name) != getattr(TrainConfig, name) and not is_used:
            option, other = (SETTINGS[each].options[0] for each in (name, needed))
            value = describe_value(getattr(config, name))
            notify(f"warning: {option} {value} has no effect without {other}{' windowed' * (needed == 'order')}")
    if 0 < config.steps <= config.warmup_steps:
        option = "--warmup-steps" if config.warmup_epochs is None else "--warmup-epochs"
        notify(
            f"warning: the warm-up of {quantity(config.warmup_steps, 'step')} is at least as long as the run of "
            f"{quantity(config.steps, 'step')}: the learning rate stays below its peak; {option} 0 disables the "
            "warm-up"
        )
    if config.learning_rate is None and config.optimizer in _SMALL_RATE_OPTIMIZERS:
        notify(
            f"warning: the default learning rate of {config.peak_learning_rate:.2g} is meant for sgd; "
            f"{config.optimizer} usually needs about 0.001: set --learning-rate"
        )


def _warn_of_labels(config: TrainConfig, data: RunData, notify: Callable[[str], None], *, has_user_loss: bool) -> None:
    if has_user_loss or config.loss == "mean-squared-error":
        warning = unmoved_labels_warning(config, label_form_of(data.source), is_named=data.targets is not None)
        if warning is not None:
            notify(warning)


def _build(config: TrainConfig, data: RunData) -> Model:
    """Build the configured model from the registry for the data; "auto" is resolved to the name of a model."""
    if data.num_classes is None:
        raise SettingError(
            "num_classes", "{setting} is needed to train a built-in model on batches of your own: give it"
        )
    size = config.image_size or min(image_shape(data.source))
    try:
        return build_model(config.model, num_classes=data.num_classes, image_size=size, dtype=config.precision)
    except UnknownModelError as error:
        raise unknown_model(error) from None


def too_large_image(name: str, image_size: int, source: HasSize) -> SettingError:
    """Return the error for an image size, the setting `name`, that exceeds that of packed images."""
    if whole_of(source) is not None:
        return SettingError(
            name,
            "{setting} must be at most the shorter side of the stored pictures, {most} px, got {size}: leave it out, "
            "or pack the data with --resize {size}",
            most=largest_size(source),
            size=image_size,
        )
    return SettingError(
        name,
        "{setting} must be at most the size of the images, {height} × {width} px, got {size}: leave it out, or pack "
        "the data with --size {size}",
        height=source.height,
        width=source.width,
        size=image_size,
    )


def unknown_model(error: UnknownModelError) -> SettingError:
    """Convert the registry's error about an unknown model to an error about the setting `model`."""
    return SettingError("model", "{setting} {rule}", rule=error.rule)
