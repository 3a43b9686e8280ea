"""Conversion of a run's settings to those that are compiled into its program, and to its runtime values."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt32
from numpy.typing import NDArray

from loopfeed.engine.config import TrainConfig, stage_error
from loopfeed.engine.data.open_data import RunData
from loopfeed.engine.feed.batches import label_form_of, whole_of
from loopfeed.engine.feed.label_form import LabelForm
from loopfeed.engine.images.settings import Augmentation
from loopfeed.engine.images.unpack import PixelScale
from loopfeed.engine.objective.best_metric import parse_metric
from loopfeed.engine.objective.losses import LOSSES
from loopfeed.engine.objective.metrics import as_metrics
from loopfeed.engine.objective.objective import Objective
from loopfeed.engine.parts import NO_PARTS, UserParts
from loopfeed.engine.patterns import parse_freeze, parse_groups
from loopfeed.engine.program.checked_model import takes_key
from loopfeed.engine.program.train_state import TrainModel
from loopfeed.engine.replicas import Replicas, norm_groups
from loopfeed.engine.run.resolve import DEFAULT_STOP_METRIC
from loopfeed.engine.run.run_stages import rate_factor
from loopfeed.engine.settings import SettingError
from loopfeed.engine.updates.layer_decay import decayed_groups
from loopfeed.engine.updates.optim import Hyperparams
from loopfeed.engine.updates.schedules import ONE_CYCLE_DIVISOR, ScheduleValues, schedule_values
from loopfeed.engine.updates.selection import dotted_paths
from loopfeed.engine.updates.settings import BatchOrigin, Cadence, CompiledSettings, RuntimeSettings, StageValues
from loopfeed.models.model import Model
from loopfeed.preprocess.extents import Whole

_MOST_IMAGES = 16
# You et al. (2019), arXiv:1904.00962, for LAMB; Kingma and Ba (2014), arXiv:1412.6980, for Adam.
_EPSILONS = {"lamb": 1e-6}
_EPSILON = 1e-8
_UNREACHABLE_TOP1 = 2.0
# Goyal et al. (2017), arXiv:1706.02677, section 5.1: a tenth of the learning rate after 30, 60 and 80 of 90 epochs.
_STEP_FRACTIONS = (1 / 3, 2 / 3, 8 / 9)
_EXPONENTIAL_FINAL_FRACTION = 0.01


def compiled_settings(
    config: TrainConfig,
    parts: UserParts = NO_PARTS,
    label_form: LabelForm | None = None,
    evaluated_form: LabelForm | None = None,
    whole: Whole | None = None,
) -> CompiledSettings:
    """Return what is compiled into a program on one device, whatever the model.

    Args:
        config: the settings.
        parts: the user-defined parts.
        label_form, evaluated_form: the form of the labels in training and in evaluations, None for class numbers.
        whole: the geometry of whole pictures, see `loopfeed.engine.feed.batches.whole_of`.
    """
    # The cross entropy has a form of its own, which smooths and mixes the targets exactly.
    loss = parts.loss if parts.loss is not None or config.loss == "cross-entropy" else LOSSES[config.loss]
    objective = Objective(loss, label_form, as_metrics(parts.metrics))
    return CompiledSettings(
        optimizer=config.optimizer,
        schedule=config.schedule,
        user_optimizer=parts.optimizer,
        user_schedule=parts.schedule,
        decay_all=config.decay_all,
        cycle_momentum=config.cycle_momentum,
        accumulates=config.accumulate_steps > 1,
        averages=config.ema_decay is not None,
        clip_order=float(config.clip_order),
        clips_value=config.clip_value is not None,
        frozen=parse_freeze(config.freeze),
        groups=parse_groups(config.groups),
        augmentation=_augmentation(config, whole),
        user_augmentation=parts.augment,
        objective=objective.of_training(),
        evaluated_objective=objective._replace(label_form=evaluated_form),
        eval_size=config.eval_image_size,
        eval_mirror=config.eval_mirror,
        histograms=config.histogram_every_steps > 0,
        stop_metric=None if config.stop_patience is None else parse_metric(config.stop_metric or DEFAULT_STOP_METRIC),
    )


def compiled_settings_of_stages(
    config: TrainConfig, parts: UserParts, model: TrainModel, data: RunData, num_devices: int
) -> tuple[CompiledSettings, ...]:
    """Return what is compiled into the program of a run for each of its stages; the arguments are those of the run.

    A stage of another image size crops as the run does and resizes the result; a resized crop is drawn at that size.

    Raises:
        SettingError: the settings of a stage do not fit each other or the data.
    """
    found = []
    frozen = tuple(parse_freeze(stage.freeze) for stage in config.by_stage)
    for number, stage in enumerate(config.by_stage, 1):
        cropped = replace(stage, image_size=config.image_size)
        resized_to = None if stage.image_size == config.image_size else stage.image_size
        try:
            settings = compiled_settings_of_run(cropped, parts, model, data, num_devices, resized_to)
            settings.augmentation.output_shape(data.source.height, data.source.width)
            settings.augmentation.check_batch(stage.batch // num_devices)
        except ValueError as error:
            if config.stages is None:
                raise
            raise stage_error(number, config, error) from error
        found.append(replace(settings, frozen_by_stage=frozen if len(set(frozen)) > 1 else ()))
    return tuple(found)


def _augmentation(config: TrainConfig, whole: Whole | None) -> Augmentation:
    return Augmentation(
        crop=config.crop,
        size=config.image_size,
        crop_padding=config.crop_padding,
        padding_mode=config.padding_mode,
        area_range=(config.crop_area, 1.0),
        horizontal_flip=config.flip,
        brightness=config.brightness,
        contrast=config.contrast,
        saturation=config.saturation,
        hue=config.hue,
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        erasing=config.erasing,
        auto_augment=config.auto_augment,
        auto_augment_ops=config.auto_augment_ops,
        auto_augment_magnitude=config.auto_augment_magnitude,
        whole=whole,
    )


def _paths_of(model: TrainModel, parts: UserParts) -> list[str]:
    """Return the dotted paths of the parameters of a network whose layers are known."""
    if parts.model is not None:
        raise SettingError(
            "layer_decay",
            "{setting} needs a network of the registry, whose layers are known, got a model of your own: give the "
            "factors of its parameters ({groups})",
        )
    return dotted_paths(jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))[0])


def compiled_settings_of_run(
    config: TrainConfig,
    parts: UserParts,
    model: TrainModel,
    data: RunData,
    num_devices: int,
    resized_to: int | None = None,
) -> CompiledSettings:
    """Return what is compiled into the program of a run; its training images are `resized_to` another size.

    Raises:
        ValueError: the metrics have too many numbers for the log.
    """
    evaluated = None if data.evaluation is None else label_form_of(data.evaluation)
    settings = compiled_settings(config, parts, label_form_of(data.source), evaluated, whole_of(data.source))
    settings.evaluated_objective.check_metrics()
    if config.layer_decay is not None:
        groups = decayed_groups(_paths_of(model, parts), config.layer_decay, settings.groups)
        settings = replace(settings, groups=groups)
    if resized_to is not None:
        settings = replace(settings, augmentation=replace(settings.augmentation, resized_to=resized_to))
    shown_images = None
    if config.log_images_every_steps:
        height, width = settings.augmentation.output_shape(data.source.height, data.source.width)
        shown_images = min(config.batch // num_devices, _MOST_IMAGES), height, width, 3
    group = config.batch if config.batch_norm_sync else config.batch_norm_group
    return replace(
        settings,
        fixes_norms=bool(settings.frozen) and parts.model is None,
        undecayed=model.undecayed if isinstance(model, Model) else (),
        takes_key=takes_key(model),
        replicas=Replicas(num_devices),
        norm_groups=norm_groups(group, config.batch, num_devices),
        shown_images=shown_images,
    )


def runtime_settings(
    config: TrainConfig,
    num_eval_batches: int,
    scale: PixelScale,
    class_weights: NDArray[np.float32] | None = None,
) -> RuntimeSettings:
    """Convert the settings to the runtime arguments of the program.

    Args:
        config: the settings.
        num_eval_batches: number of batches of one evaluation; 0 without evaluations.
        scale: mean and standard deviation of the pixels.
        class_weights: weights of the classes in the training loss, float32 [K]; None for none.
    """
    return RuntimeSettings(
        stop_step=jnp.int32(config.steps),
        evaluations=_cadence(config.eval_every_steps),
        num_eval_batches=jnp.int32(num_eval_batches),
        stop_at_top1=jnp.float32(_UNREACHABLE_TOP1 if config.stop_at_top1 is None else config.stop_at_top1),
        snapshots=_cadence(config.snapshot_cadence),
        hyperparams=Hyperparams(
            learning_rate=jnp.float32(1),  # multiplies the schedule's learning rate
            momentum=jnp.float32(config.momentum),
            weight_decay=jnp.float32(config.weight_decay),
            beta2=jnp.float32(config.beta2),
            epsilon=jnp.float32(_EPSILONS.get(config.optimizer, _EPSILON)),
            trust_coefficient=jnp.float32(1e-3),
            clip_norm=jnp.float32(np.inf if config.clip_norm is None else config.clip_norm),
            clip_value=jnp.float32(np.inf if config.clip_value is None else config.clip_value),
        ),
        schedule=jax.tree.map(jnp.asarray, schedule_of(config)),
        accumulate_steps=jnp.int32(config.accumulate_steps),
        average_decay=jnp.float32(config.ema_decay or 0),
        most_skips=jnp.int32(config.most_skips),
        smoothing=jnp.float32(config.label_smoothing),
        seed_words=jnp.asarray(seed_words(config.seed)),
        scale=scale,
        histograms=_cadence(config.histogram_every_steps),
        images=_cadence(config.log_images_every_steps),
        stop_patience=None if config.stop_patience is None else jnp.int32(config.stop_patience),
        stages=() if config.stages is None else tuple(_stage_values(config)),
        class_weights=None if class_weights is None else jnp.asarray(class_weights),
    )


def _stage_values(config: TrainConfig) -> Iterator[StageValues]:
    spans = zip(config.stages or (), config.by_stage, config.step_ranges, config.batch_ranges, strict=True)
    for stage, own, steps, batches in spans:
        origin = BatchOrigin(
            jnp.int32(batches.first), *(jnp.uint32(each) for each in divmod(batches.first_image, 2**32))
        )
        yield StageValues(
            first_step=jnp.int32(steps.first),
            stop_step=jnp.int32(steps.stop),
            peak=jnp.float32(stage.settings.get("learning_rate", config.peak_learning_rate)),
            learning_rate=jnp.float32(rate_factor(config, stage)),
            smoothing=jnp.float32(own.label_smoothing),
            origin=origin if config.changes_batch else None,
        )


def _cadence(every_steps: int | None) -> Cadence:
    return Cadence(jnp.int32(every_steps or 0))


def seed_words(seed: int) -> UInt32[np.ndarray, "2"]:
    """Split a seed, which may have more bits than a jax integer, into its high and low halves."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def schedule_of(config: TrainConfig) -> ScheduleValues:
    """Convert the settings to the runtime values of the schedule, which is in its current cycle if one was appended."""
    final_fraction, peak = config.final_fraction, config.peak_learning_rate
    if final_fraction is None:
        final_fraction = _EXPONENTIAL_FINAL_FRACTION if config.schedule == "exponential" else 0.0
    num_steps = max(config.steps - config.cycle_start_steps, 0)
    begin: dict[str, Any] = {"start_step": config.cycle_start_steps}
    if config.cycle_start_steps and peak:
        # The first learning rate of a cycle is that before, whether it begins with a warm-up or with the cycle's rise.
        divisor = 1.0
        if config.schedule == "one-cycle":
            divisor = ONE_CYCLE_DIVISOR
            if not config.warmup_steps and 0 < config.cycle_start_rate <= peak:
                divisor = begin["start_divisor"] = peak / config.cycle_start_rate
        begin["warmup_start"] = config.cycle_start_rate / (peak / divisor)
    return schedule_values(
        peak,
        num_steps,
        warmup_steps=config.warmup_steps,
        milestones=[round(fraction * num_steps) for fraction in _STEP_FRACTIONS],
        final_fraction=final_fraction,
        power=config.schedule_power,
        restart_cycles=config.restart_cycles,
        restart_growth=config.restart_growth,
        **begin,
    )
