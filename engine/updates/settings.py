"""The settings of the training program: those that are compiled into it, and its runtime values.

`loopfeed.engine.run.program_settings` makes both from a `TrainConfig`. They are here because this is the lowest room
that reads them.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from loopfeed.engine.config import OptimizerName, ScheduleName
from loopfeed.engine.images.augment import UserAugmentation
from loopfeed.engine.images.settings import Augmentation
from loopfeed.engine.images.unpack import PixelScale
from loopfeed.engine.objective.best_metric import BestMetric
from loopfeed.engine.objective.objective import CROSS_ENTROPY, Objective
from loopfeed.engine.patterns import Group
from loopfeed.engine.replicas import ALONE, Replicas
from loopfeed.engine.updates.optim import Hyperparams
from loopfeed.engine.updates.schedules import Schedule, ScheduleValues
from loopfeed.engine.updates.user_optimizer import UserOptimizer
from loopfeed.models.layers.batch_norm import NormGroups


@dataclass(frozen=True, kw_only=True)
class CompiledSettings:
    """The settings that are compiled into the program.

    Attributes:
        optimizer, schedule: the names of the optimizer and of the schedule.
        user_optimizer, user_schedule: user-defined, instead of the named ones.
        decay_all: whether to decay norms and biases as well as kernels.
        undecayed: keys of the parameters that are not decayed although they have several axes; see `kernels_only`.
        cycle_momentum: whether to use the momentum of `momentum_at` instead of the hyperparameters'.
        accumulates: whether to accumulate gradients over `RuntimeSettings.accumulate_steps` batches; otherwise each
            batch is an update, and no memory is kept for sums.
        averages: whether to keep an exponential moving average of the weights.
        average_ramp: whether the average follows faster at first.
        clip_order: the order of the norm that is clipped, at least 1; inf is the largest magnitude.
        clips_value: whether to clip each element to `Hyperparams.clip_value`.
        frozen: patterns of the dotted paths of parameters that are not trained.
        frozen_by_stage: those of each stage of the run, if they differ.
        fixes_norms: whether batch norms whose running statistics are not trained normalise with these.
        groups: factors on the learning rate and the weight decay of some parameters.
        augmentation: augmentation of the images.
        user_augmentation: a user-defined one, applied after `augmentation`.
        objective, evaluated_objective: the loss and the metrics in training, and in evaluations, whose labels can have
            another form.
        eval_size: height and width in pixels of the network's input in evaluations; None for that of `augmentation`.
        eval_mirror: whether evaluations average the logits of each image and its mirror image.
        takes_key: whether the model's `apply` takes PRNG keys.
        replicas: the devices that train together.
        norm_groups: the images over which norms average in training.
        histograms: whether histograms of the weights and gradients are pushed.
        shown_images: the shape (k, h, w, 3) of the images that are pushed, None for none.
        stop_metric: what `RuntimeSettings.stop_patience` compares; None if evaluations are not compared.
    """

    optimizer: OptimizerName = "sgd"
    schedule: ScheduleName = "constant"
    user_optimizer: UserOptimizer | None = None
    user_schedule: Schedule | None = None
    decay_all: bool = False
    undecayed: tuple[str, ...] = ()
    cycle_momentum: bool = False
    accumulates: bool = False
    averages: bool = False
    average_ramp: bool = True
    clip_order: float = 2
    clips_value: bool = False
    frozen: tuple[str, ...] = ()
    frozen_by_stage: tuple[tuple[str, ...], ...] = ()
    fixes_norms: bool = False
    groups: tuple[Group, ...] = ()
    augmentation: Augmentation = field(default_factory=Augmentation)
    user_augmentation: UserAugmentation | None = None
    objective: Objective = CROSS_ENTROPY
    evaluated_objective: Objective = CROSS_ENTROPY
    eval_size: int | None = None
    eval_mirror: bool = False
    takes_key: bool = False
    replicas: Replicas = ALONE
    norm_groups: NormGroups = field(default_factory=NormGroups)
    histograms: bool = False
    shown_images: tuple[int, int, int, int] | None = None
    stop_metric: BestMetric | None = None

    @property
    def evaluated_augmentation(self) -> Augmentation:
        """The augmentation whose size is that of evaluations."""
        return self.augmentation if self.eval_size is None else replace(self.augmentation, size=self.eval_size)

    @property
    def has_user_part(self) -> bool:
        """Whether the optimizer or the schedule is user-defined."""
        return self.user_optimizer is not None or self.user_schedule is not None


class Cadence(NamedTuple):
    """What comes after every `every_steps`-th update; 0: never."""

    every_steps: Int32[Array, ""]

    def is_due(self, step: Int32[Array, ""]) -> Bool[Array, ""]:
        """Return whether it comes after update `step`, counted from 1."""
        return (self.every_steps > 0) & (lax.rem(step, jnp.maximum(self.every_steps, 1)) == 0)

    def next_after(self, step: Int32[Array, ""], stop_step: Int32[Array, ""]) -> Int32[Array, ""]:
        """Return the first update after `step` after which it comes, but at most `stop_step`."""
        multiple = (lax.div(step, jnp.maximum(self.every_steps, 1)) + 1) * self.every_steps
        # A product that overflows int32 is negative.
        return jnp.where(multiple > step, jnp.minimum(multiple, stop_step), stop_step)


class BatchOrigin(NamedTuple):
    """The batch from which the positions of images are counted, and the position of its first image in two words."""

    batch_index: Int32[Array, ""]
    high: UInt32[Array, ""]
    low: UInt32[Array, ""]


class StageValues(NamedTuple):
    """The runtime settings that a stage has of its own.

    Attributes:
        first_step, stop_step: number of updates before it, and after its last; that of the last stage is not used.
        peak: of the schedule.
        learning_rate: multiplies the schedule's learning rate.
        smoothing: label smoothing.
        origin: None if no stage changes the batch.
    """

    first_step: Int32[Array, ""]
    stop_step: Int32[Array, ""]
    peak: Float32[Array, ""]
    learning_rate: Float32[Array, ""]
    smoothing: Float32[Array, ""]
    origin: BatchOrigin | None


class RuntimeSettings(NamedTuple):
    """The settings that are arguments of the program, which can change without recompilation.

    Attributes:
        stop_step: number of updates after which to leave the loop.
        evaluations: when to evaluate, besides the end.
        num_eval_batches: batches of one evaluation.
        stop_at_top1: leave the loop once an evaluation reaches it; above 1: never.
        snapshots: when to push a snapshot.
        hyperparams: the optimizer's hyperparameters; their learning rate multiplies the schedule's.
        schedule: the schedule's values.
        accumulate_steps: batches per update; used if gradients are accumulated.
        average_decay: in 0 … 1; used if weights are averaged.
        most_skips: largest number of skipped updates in a row.
        smoothing: label smoothing, see `loopfeed.engine.objective.objective`.
        seed_words: the seed's high and low half, which key the augmentation.
        scale: mean and standard deviation of the pixels.
        histograms, images: when to push histograms, or images; used if that is compiled into the program.
        stop_patience: leave the loop after so many evaluations in a row that are not better than the best before; None
            if they are not compared.
        origin: of the positions of images; None counts from the first batch.
        stages: what each stage has of its own; empty in a run without stages.
        class_weights: weights of the classes in the training loss; None if there are none.
    """

    stop_step: Int32[Array, ""]
    evaluations: Cadence
    num_eval_batches: Int32[Array, ""]
    stop_at_top1: Float32[Array, ""]
    snapshots: Cadence
    hyperparams: Hyperparams
    schedule: ScheduleValues
    accumulate_steps: Int32[Array, ""]
    average_decay: Float32[Array, ""]
    most_skips: Int32[Array, ""]
    smoothing: Float32[Array, ""]
    seed_words: UInt32[Array, "2"]
    scale: PixelScale
    histograms: Cadence
    images: Cadence
    stop_patience: Int32[Array, ""] | None = None
    origin: BatchOrigin | None = None
    stages: tuple[StageValues, ...] = ()
    class_weights: Float32[Array, "K"] | None = None

    def in_stage(self, number: int) -> "RuntimeSettings":
        """Return the settings of a stage; `stop_step` stays that of the run."""
        if not self.stages:
            return self
        stage = self.stages[number]
        return self._replace(
            hyperparams=self.hyperparams._replace(learning_rate=stage.learning_rate),
            schedule=self.schedule._replace(peak=stage.peak),
            smoothing=stage.smoothing,
            origin=stage.origin,
        )
