"""Conversion of a run's settings to the static settings and the runtime values of its program."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt32

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.feed.label_form import LabelForm
from loopfeed.engine.images.settings import Augmentation
from loopfeed.engine.images.unpack import PixelScale
from loopfeed.engine.images.user_augment import UserAugmentation
from loopfeed.engine.objective.losses import LOSSES, Loss
from loopfeed.engine.objective.metrics import Metric, PerExample, as_metrics
from loopfeed.engine.objective.objective import CROSS_ENTROPY, Objective
from loopfeed.engine.patterns import parse_freeze, parse_groups
from loopfeed.engine.program.observed import NOTHING, Observation
from loopfeed.engine.program.train_state import RunValues
from loopfeed.engine.replicas import ALONE, Replicas
from loopfeed.engine.updates.optim import Hyperparams
from loopfeed.engine.updates.schedules import ONE_CYCLE_DIVISOR, ScheduleValues, schedule_values
from loopfeed.engine.updates.update import Schedule, UpdateRule, UpdateValues
from loopfeed.engine.updates.user_optimizer import UserOptimizer
from loopfeed.models.layers.batch_norm import NormGroups

# You et al. (2019), arXiv:1904.00962, for LAMB; Kingma and Ba (2014), arXiv:1412.6980, for Adam.
_EPSILONS = {"lamb": 1e-6}
_EPSILON = 1e-8
_UNREACHABLE_TOP1 = 2.0


class Statics(NamedTuple):
    """The settings that are compiled into the program.

    Attributes:
        rule: rule for the updates.
        augmentation: augmentation of the images.
        eval_mirror: whether evaluations average the logits of each image and its mirror image.
        objective, evaluated_objective: the loss and the metrics in training, and in evaluations, whose labels can have
            another form.
        augment: a user-defined augmentation, applied after `augmentation`.
        takes_key: whether the model's `apply` takes PRNG keys.
        replicas: the devices that train together.
        norm_groups: the images over which norms average in training.
        observation: what is pushed of the weights, gradients and images.
    """

    rule: UpdateRule
    augmentation: Augmentation
    eval_mirror: bool
    objective: Objective = CROSS_ENTROPY
    evaluated_objective: Objective = CROSS_ENTROPY
    augment: UserAugmentation | None = None
    takes_key: bool = False
    replicas: Replicas = ALONE
    norm_groups: NormGroups = NormGroups()
    observation: Observation = NOTHING


class UserFunctions(NamedTuple):
    """The user-defined functions that are traced into the program; None for those selected by the settings.

    Attributes:
        loss: the loss of each example.
        metrics: metrics by name.
        optimizer, schedule: the optimizer and the learning-rate schedule.
        augment: an augmentation after those of the settings.
    """

    loss: Loss | None = None
    metrics: Mapping[str, Metric | PerExample] | None = None
    optimizer: UserOptimizer | None = None
    schedule: Schedule | None = None
    augment: UserAugmentation | None = None


NO_OWN_FUNCTIONS = UserFunctions()


def statics_of(
    config: TrainConfig,
    own: UserFunctions = NO_OWN_FUNCTIONS,
    label_form: LabelForm | None = None,
    evaluated_form: LabelForm | None = None,
    undecayed: tuple[str, ...] = (),
) -> Statics:
    """Extract the settings of a run that are compiled into the program.

    Args:
        config: the settings.
        own: the user-defined functions.
        label_form, evaluated_form: the form of the labels in training and in evaluations, None for class numbers.
        undecayed: as in `loopfeed.Model.undecayed`.
    """
    rule = UpdateRule(
        optimizer=config.optimizer,
        schedule=config.schedule,
        decay_all=config.decay_all,
        cycle_momentum=config.cycle_momentum,
        accumulates=config.accumulate_steps > 1,
        averages=config.ema_decay is not None,
        clip_order=float(config.clip_order),
        clips_value=config.clip_value is not None,
        frozen=parse_freeze(config.freeze),
        groups=parse_groups(config.groups),
        user_optimizer=own.optimizer,
        user_schedule=own.schedule,
        undecayed=undecayed,
    )
    augmentation = Augmentation(
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
    )
    # The cross entropy has a form of its own, which smooths and mixes the targets exactly.
    loss = own.loss if own.loss is not None or config.loss == "cross-entropy" else LOSSES[config.loss]
    objective = Objective(loss, label_form, as_metrics(own.metrics))
    evaluated = objective._replace(label_form=evaluated_form)
    return Statics(rule, augmentation, config.eval_mirror, objective.of_training(), evaluated, own.augment)


def update_values(config: TrainConfig) -> UpdateValues:
    """Convert the settings to the runtime values of the updates."""
    clip_norm = np.inf if config.clip_norm is None else config.clip_norm
    hyperparams = Hyperparams(
        learning_rate=jnp.float32(1),  # multiplies the schedule's learning rate
        momentum=jnp.float32(config.momentum),
        weight_decay=jnp.float32(config.weight_decay),
        beta2=jnp.float32(config.beta2),
        epsilon=jnp.float32(_EPSILONS.get(config.optimizer, _EPSILON)),
        trust_coefficient=jnp.float32(1e-3),
        clip_norm=jnp.float32(clip_norm),
        clip_value=jnp.float32(np.inf if config.clip_value is None else config.clip_value),
    )
    return UpdateValues(
        hyperparams=hyperparams,
        schedule=jax.tree.map(jnp.asarray, _schedule_values(config)),
        accumulate_steps=jnp.int32(config.accumulate_steps),
        average_decay=jnp.float32(config.ema_decay or 0),
        most_skips=jnp.int32(config.most_skips),
    )


def _schedule_values(config: TrainConfig) -> ScheduleValues:
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


# Goyal et al. (2017), arXiv:1706.02677, section 5.1: a tenth of the learning rate after 30, 60 and 80 of 90 epochs.
_STEP_FRACTIONS = (1 / 3, 2 / 3, 8 / 9)
_EXPONENTIAL_FINAL_FRACTION = 0.01


def run_values(config: TrainConfig, num_eval_batches: int, scale: PixelScale) -> RunValues:
    """Convert the settings to the runtime arguments of the program.

    Args:
        config: the settings.
        num_eval_batches: number of batches of one evaluation; 0 without evaluations.
        scale: mean and standard deviation of the pixels.
    """
    return RunValues(
        stop_step=jnp.int32(config.steps),
        eval_every_steps=jnp.int32(config.eval_every_steps or 0),
        num_eval_batches=jnp.int32(num_eval_batches),
        stop_at_top1=jnp.float32(_UNREACHABLE_TOP1 if config.stop_at_top1 is None else config.stop_at_top1),
        snapshot_every_steps=jnp.int32(config.snapshot_cadence),
        update=update_values(config),
        smoothing=jnp.float32(config.label_smoothing),
        seed_words=jnp.asarray(seed_words(config.seed)),
        scale=scale,
        histogram_every_steps=_cadence(config.histogram_every_steps),
        log_images_every_steps=_cadence(config.log_images_every_steps),
    )


def _cadence(every_steps: int) -> jax.Array | None:
    return jnp.int32(every_steps) if every_steps else None


def seed_words(seed: int) -> UInt32[np.ndarray, "2"]:
    """Split a seed, which may have more bits than a jax integer, into its high and low halves."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
