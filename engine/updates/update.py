"""The update of the weights with the gradients of one microbatch: accumulate, clip, update or skip, and average.

Owns the part of the loop's carry that only updates read or write. Does not depend on batches, models or the loop.

Each iteration of the loop takes one batch, a *microbatch* of an update; at every `accumulate_steps`-th batch an update
is *due*, and `step` counts these. `batch_index` addresses the data; `step` addresses the schedule, the loss lines and
the run's length. A skipped update counts as well: it is a step, has its place in the schedule, and its batches are used
up, so that the order of the data depends only on the position. As long as accumulate_steps stays the same,
batch_index = step · accumulate_steps + accumulated.num_batches.

`optax.MultiSteps` is not used: it hides the mean from the check that skips an update, does not accumulate the losses
of the same update, and keeps a running mean, which rounds at every batch.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Float32, Int32

from loopfeed.engine.settings import SettingError
from loopfeed.engine.updates.averages import init_average, update_average
from loopfeed.engine.updates.optim import Hyperparams, every_leaf, in_float32, kernels_only, make_optimizer
from loopfeed.engine.updates.reach import UNKNOWN, Reach, check_reach, following, keeps_finite
from loopfeed.engine.updates.schedules import learning_rate_at, momentum_at
from loopfeed.engine.updates.selection import StagedParts, dotted_path, join_frozen, join_parts, split_frozen
from loopfeed.engine.updates.settings import CompiledSettings, RuntimeSettings
from loopfeed.engine.updates.skipping import (
    Skips,
    all_finite,
    choose,
    clip_gradient,
    count_skips,
    gives_up,
    global_norm,
    has_finite_norm,
    init_skips,
)
from loopfeed.engine.updates.user_optimizer import has_user_rate, make_user_optimizer
from loopfeed.models.layers.bfloat16_bits import to_float32, wide_dtype
from loopfeed.models.layers.platform_forms import materialize


class Accumulation(NamedTuple):
    """The values accumulated since the last update.

    Attributes:
        num_batches: number of batches in the sums.
        sums: pytree of float32 leaves.
    """

    num_batches: Int32[Array, ""]
    sums: Any


def init_accumulation(tree: Any) -> Accumulation:
    """Return sums initialised to zero, with the structure and shapes of `tree`.

    The leaves of `tree` may be `jax.ShapeDtypeStruct`s.
    """
    return Accumulation(
        jnp.zeros((), jnp.int32), jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), wide_dtype(leaf)), tree)
    )


def accumulate(
    accumulated: Accumulation, new: Any, every: Int32[Array, ""]
) -> tuple[Any, Bool[Array, ""], Accumulation]:
    """Add the values of one batch to the sums, and return the mean so far.

    The mean of k means of b images each is the mean of the k · b images: without batch statistics, k batches make the
    same update as one batch k times as large.

    Args:
        accumulated: the sums of the previous batches.
        new: pytree of the structure given to `init_accumulation`, of any float dtypes.
        every: batches per update, a runtime value; below 1 counts as 1. If a resumed run has lowered it below the
            number of batches already accumulated, the update is due at once, over all of them.

    Returns:
        The mean over the accumulated batches (float32), whether an update is due, and the sums for the next batch:
        empty if an update is due.
    """
    num_batches = accumulated.num_batches + 1
    sums = jax.tree.map(lambda total, leaf: total + to_float32(leaf), accumulated.sums, new)
    due = num_batches >= every
    means = jax.tree.map(lambda total: total / num_batches.astype(jnp.float32), sums)
    remaining = jax.tree.map(lambda total: jnp.where(due, 0, total), sums)
    return means, due, Accumulation(jnp.where(due, 0, num_batches), remaining)


class Weights(NamedTuple):
    """The params and batch_stats of a model, as pytrees of arrays."""

    params: Any
    batch_stats: Any


class UpdateState(NamedTuple):
    """The state of the updates, a part of the loop's carry; all of it is needed to resume.

    Attributes:
        opt_state: the optimizer's moments, float32; a tuple of them, one for each part of `StagedParts`, if the stages
            of the run freeze different parameters.
        skips: number of skipped updates.
        accumulated: sums since the last update, or None if gradients are not accumulated.
        average: average of the weights in float32, or None if none is kept.
    """

    opt_state: optax.OptState
    skips: Skips
    accumulated: Accumulation | None
    average: Weights | None


class Microbatch(NamedTuple):
    """The loss, gradients and batch statistics of one batch.

    Attributes:
        loss: mean loss of the batch.
        gradients: gradients of that loss, a pytree like the trained parameters.
        batch_stats: the model's new batch statistics.
    """

    loss: Float[Array, ""]
    gradients: Any
    batch_stats: Any


class Outcome(NamedTuple):
    """The result of one microbatch: whether an update was due, the loss, and the learning rate.

    Attributes:
        due: whether an update was due, made or skipped.
        gives_up: whether to leave the loop, because too many updates in a row were skipped.
        loss: mean over the update's batches so far.
        learning_rate: learning rate of the update.
        gradients: mean gradient over the update's batches so far and, if an update was due, over all devices, before it
            is clipped.
        reach: bounds of the weights after the batch, for the next one.
    """

    due: Bool[Array, ""]
    gives_up: Bool[Array, ""]
    loss: Float[Array, ""]
    learning_rate: Float32[Array, ""]
    gradients: Any
    reach: Reach


def init_update(settings: CompiledSettings, weights: Weights) -> UpdateState:
    """Return the state before the first batch; its structure depends only on the settings and the weights.

    Raises:
        ValueError: a parameter that is not frozen is not floating-point, or a user-defined optimizer does not fit.
    """
    trained, _ = split_frozen(weights.params, settings.frozen)
    parts = _parts_of(settings, weights.params)
    if parts is not None:
        trained = parts.take(weights.params)
    _check_trainable(trained)
    zero = jnp.zeros((), jnp.float32)
    optimizer = optimizer_of(settings, Hyperparams(zero, zero, zero), np.True_)
    opt_state = (
        optimizer.init(trained)
        if parts is None
        else tuple(optimizer.init(parts.take(trained, number)) for number in range(len(parts.stages)))
    )
    return UpdateState(
        opt_state=opt_state,
        skips=init_skips(),
        accumulated=init_accumulation((jnp.zeros(()), trained)) if settings.accumulates else None,
        average=init_average(weights) if settings.averages else None,
    )


def _parts_of(settings: CompiledSettings, params: Any) -> StagedParts | None:
    """Return the parts of the parameters with optimizer states of their own; None if there is one state."""
    return StagedParts.of(params, settings.frozen_by_stage) if settings.frozen_by_stage else None


def _like(tree: Any, part: Any) -> Any:
    """Return the leaves of a tree that a part of it has too; None stands for the others."""
    return jax.tree.map(lambda own, leaf: None if own is None else leaf, part, tree, is_leaf=lambda leaf: leaf is None)


def _check_trainable(trained: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
        # A complex parameter has a gradient too.
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise SettingError(
                "freeze",
                "a parameter must be floating-point to be trained, but {path} is {dtype}: freeze it ({setting} "
                "{path}), or let the model return it in batch_stats",
                path=dotted_path(path),
                dtype=jnp.result_type(leaf),
            )


def update_weights(
    settings: CompiledSettings,
    weights: Weights,
    state: UpdateState,
    microbatch: Microbatch,
    step: Int32[Array, ""],
    values: RuntimeSettings,
    reach: Reach = UNKNOWN,
) -> tuple[Weights, UpdateState, Outcome]:
    """Process one microbatch, and make the update if one is due.

    An update with a NaN or infinite gradient is skipped: parameters, moments and average are unchanged. So is an
    update of a finite gradient that would make a finite parameter, or its average, NaN or infinite. Batch
    statistics are replaced by those of every batch whose statistics are finite, because one bad batch would spoil them
    for good.

    Each device has its own part of the batch. Loss, gradients and statistics are averaged over the devices when an
    update is due; until then, each device accumulates its own.

    Args:
        settings, values: the settings of the program.
        weights: weights before the batch.
        state: state before the batch.
        microbatch: loss, gradients and statistics of the batch.
        step: updates due before this batch; the caller adds `due` to it.
        reach: bounds of the weights, those of the outcome of the batch before.

    Returns:
        The weights and the state after the batch, of the same structure and dtypes, and the outcome.
    """
    replicas, parts = settings.replicas, _parts_of(settings, weights.params)
    due, accumulated = jnp.ones((), jnp.bool), None
    loss, gradients = to_float32(microbatch.loss), microbatch.gradients
    if state.accumulated is not None:
        gathered = state.accumulated
        if parts is not None:
            # The sums of what this stage does not train are zeros: a stage ends with an update.
            gathered = gathered._replace(sums=_like(gathered.sums, (loss, gradients)))
        (loss, gradients), due, accumulated = accumulate(gathered, (loss, gradients), values.accumulate_steps)
        if parts is not None:
            sums = join_frozen(accumulated.sums, state.accumulated.sums)
            accumulated = accumulated._replace(sums=sums)
    batch_stats = microbatch.batch_stats
    if replicas.count > 1:
        own = choose(all_finite(batch_stats), batch_stats, weights.batch_stats)
        # The mean of three equal numbers may differ from them in its last digit.
        varying, kept = split_frozen(own, settings.frozen)
        with jax.named_scope("reduce"):
            loss, gradients, varying = replicas.mean_if(due, (loss, gradients, varying))
        batch_stats = join_frozen(varying, kept)
    move = _Move(settings, hyperparams_at(settings, step, values), loss, values.average_decay, step, parts)
    all_states = state.opt_state
    if parts is not None:
        state = state._replace(opt_state=tuple(all_states[each] for each in parts.trained_with(settings.frozen)))
    trained, frozen = split_frozen(weights.params, settings.frozen)
    average = None if state.average is None else split_frozen(state.average.params, settings.frozen)[0]
    before = trained, state.opt_state, average
    finite = has_finite_norm(gradients) & jnp.isfinite(move.hyperparams.learning_rate)
    if settings.user_optimizer is None:
        is_fit, reach = move.check(before, gradients, finite, reach)
        finite = finite & is_fit
        applied = due & finite
        moved, opt_state = move.make(trained, state.opt_state, gradients, applied)
    else:
        moved, opt_state = move.make(trained, state.opt_state, gradients, np.True_)
        finite = finite & materialize(move.fits(before, (moved, opt_state)))
        applied = due & finite
        opt_state = choose(applied, opt_state, state.opt_state)
    if parts is not None:
        moved_states = dict(zip(parts.trained_with(settings.frozen), opt_state, strict=True))
        opt_state = tuple(moved_states.get(number, each) for number, each in enumerate(all_states))
    updated = Weights(
        join_frozen(choose(applied, moved, trained), frozen),
        choose(all_finite(batch_stats), batch_stats, weights.batch_stats),
    )
    skips = count_skips(state.skips, due, finite)
    weights_average = state.average
    if weights_average is not None:
        followed = update_average(weights_average, updated, values.average_decay, step, ramp=settings.average_ramp)
        weights_average = choose(applied, followed, weights_average)
    outcome = Outcome(due, gives_up(skips, values.most_skips), loss, move.hyperparams.learning_rate, gradients, reach)
    return updated, UpdateState(opt_state, skips, accumulated, weights_average), outcome


@dataclass(frozen=True)
class _Move:
    """The move of an update, from trained parameters, state and average as they are before it.

    Attributes:
        settings, hyperparams: those of the update.
        loss: which a user-defined optimizer may use.
        average_decay, step: as `update_average` takes them.
        parts: the parts with optimizer states of their own, None if there is one state.
    """

    settings: CompiledSettings
    hyperparams: Hyperparams
    loss: Float[Array, ""]
    average_decay: Float32[Array, ""]
    step: Int32[Array, ""]
    parts: StagedParts | None = None

    def make(
        self, trained: Any, opt_state: Any, gradients: Any, applied: Bool[Array, ""] | np.bool, *, clips: bool = True
    ) -> tuple[Any, Any]:
        """Return the parameters and the optimizer's state after the move; `applied` is as `make_optimizer` takes it."""
        optimizer = optimizer_of(self.settings, self.hyperparams, applied, clips=clips and self.parts is None)
        extra = {} if self.settings.user_optimizer is None else {"value": self.loss}
        if self.parts is None:
            updates, opt_state = optimizer.update(gradients, opt_state, trained, **extra)
            return optax.apply_updates(trained, updates), opt_state
        if clips:
            # The norm is that of all parts together.
            clip = in_float32(_clip_of(self.settings, self.hyperparams))
            gradients, _ = clip.update(gradients, clip.init(trained))
        numbers = self.parts.trained_with(self.settings.frozen)
        found = [
            optimizer.update(self.parts.take(gradients, each), own, self.parts.take(trained, each), **extra)
            for each, own in zip(numbers, opt_state, strict=True)
        ]
        updates = join_parts([updates for updates, _ in found])
        return optax.apply_updates(trained, updates), tuple(own for _, own in found)

    def fits(self, before: tuple[Any, Any, Any], moved: tuple[Any, Any]) -> Bool[Array, ""]:
        """Return whether the move, and that of the average after it, keeps every finite number finite."""
        average = before[2]
        if average is not None:
            average = update_average(average, moved[0], self.average_decay, self.step, ramp=self.settings.average_ramp)
        return keeps_finite(before, (*moved, average))

    def check(
        self, before: tuple[Any, Any, Any], gradients: Any, finite: Bool[Array, ""], reach: Reach
    ) -> tuple[Bool[Array, ""], Reach]:
        """Return `fits` of the move that a ready-made optimizer would make, and bounds after it."""
        norm = jnp.where(finite, global_norm(gradients), 0)
        count = sum(leaf.size for leaf in jax.tree.leaves(before[0]))
        follow = partial(
            following, self.settings.optimizer, self.hyperparams, self.settings.groups, norm=norm, count=count
        )

        def look(before: tuple[Any, Any, Any], gradients: Any, *, clips: bool = True) -> jax.Array:
            return self.fits(before, self.make(*before[:2], gradients, np.True_, clips=clips))

        return check_reach(reach, follow, before, gradients, look)


def optimizer_of(
    settings: CompiledSettings, hyperparams: Hyperparams, applied: Bool[Array, ""] | np.bool, *, clips: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer, which first clips the gradient; `applied` is as `make_optimizer` takes it."""
    clip = _clip_of(settings, hyperparams) if clips else optax.identity()
    if settings.user_optimizer is not None:
        return make_user_optimizer(
            settings.user_optimizer, hyperparams.learning_rate, clip=clip, groups=settings.groups
        )
    kernels = partial(kernels_only, undecayed=settings.undecayed)
    return make_optimizer(
        settings.optimizer,
        hyperparams,
        decay_mask=every_leaf if settings.decay_all else kernels,
        trust_mask=kernels,
        applied=applied,
        clip=clip,
        groups=settings.groups,
    )


def _clip_of(settings: CompiledSettings, hyperparams: Hyperparams) -> optax.GradientTransformation:
    largest_value = hyperparams.clip_value if settings.clips_value else None
    return clip_gradient(hyperparams.clip_norm, settings.clip_order, largest_value)


def hyperparams_at(settings: CompiledSettings, step: Int32[Array, ""], values: RuntimeSettings) -> Hyperparams:
    """Return the hyperparameters at one step, with the schedule's learning rate and momentum filled in.

    If the optimizer has a learning rate of its own, the learning rate here is only the factor requested by the user.
    """
    hyperparams = values.hyperparams
    learning_rate = hyperparams.learning_rate
    if settings.user_schedule is not None:
        learning_rate = learning_rate * jnp.asarray(settings.user_schedule(step), jnp.float32)
    elif settings.user_optimizer is None or not has_user_rate(settings.user_optimizer):
        learning_rate = learning_rate * learning_rate_at(settings.schedule, step, values.schedule)
    momentum = momentum_at(step, values.schedule) if settings.cycle_momentum else hyperparams.momentum
    return hyperparams._replace(learning_rate=learning_rate, momentum=momentum)
