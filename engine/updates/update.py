"""The update of the weights with the gradients of one pull: accumulate, clip, update or skip, and average.

Owns the part of the loop's carry that only updates read or write. Does not depend on batches, models or the loop.

Each iteration of the loop takes one batch, a *pull*; at every `accumulate_steps`-th pull an update is *due*, and `step`
counts these. The number of pulls addresses the data; `step` addresses the schedule, the loss lines and the run's
length. A skipped update counts as well: it is a step, has its place in the schedule, and its batches are used up, so
that the order of the data depends only on the position. As long as accumulate_steps stays the same,
pulls = step · accumulate_steps + gathered.num_pulls.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from engine.config import OptimizerName, ScheduleName
from engine.updates.accumulation import Accumulation, accumulate, init_accumulation
from engine.updates.averages import init_average, update_average
from engine.updates.optim import Hyperparams, every_leaf, init_optimizer, kernels_only, make_optimizer
from engine.updates.schedules import ScheduleValues, learning_rate_at, momentum_at
from engine.updates.skipping import Skips, all_finite, choose, count_skips, gives_up, has_finite_norm, init_skips


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """The static settings of the updates, compiled into the program.

    Attributes:
        optimizer, schedule: the names of the optimizer and of the schedule.
        decay_all: whether to decay norms and biases as well as kernels.
        cycle_momentum: whether to use the momentum of `momentum_at` instead of the hyperparameters'.
        accumulates: whether to accumulate gradients over `UpdateValues.accumulate_steps` pulls; otherwise each pull is
            an update, and no memory is kept for sums.
        averages: whether to keep an exponential moving average of the weights.
        average_ramp: whether the average follows faster at first.
    """

    optimizer: OptimizerName = "sgd"
    schedule: ScheduleName = "constant"
    decay_all: bool = False
    cycle_momentum: bool = False
    accumulates: bool = False
    averages: bool = False
    average_ramp: bool = True


class UpdateValues(NamedTuple):
    """The runtime values of the updates, which can change without recompilation.

    Attributes:
        hyperparams: the optimizer's hyperparameters; their learning rate multiplies the schedule's.
        schedule: the schedule's values.
        accumulate_steps: int32 [], pulls per update; used if the rule accumulates.
        average_decay: float32 [] in 0 … 1; used if the rule averages.
        most_skips: int32 [], largest number of skipped updates in a row.
    """

    hyperparams: Hyperparams
    schedule: ScheduleValues
    accumulate_steps: jax.Array
    average_decay: jax.Array
    most_skips: jax.Array


class Weights(NamedTuple):
    """The params and batch_stats of a model, as pytrees of arrays."""

    params: Any
    batch_stats: Any


class UpdateState(NamedTuple):
    """The state of the updates, a part of the loop's carry; all of it is needed to resume.

    Attributes:
        opt_state: the optimizer's moments, float32.
        skips: number of skipped updates.
        gathered: sums since the last update, or None if the rule does not accumulate.
        average: average of the weights in float32, or None if the rule keeps none.
    """

    opt_state: optax.OptState
    skips: Skips
    gathered: Accumulation | None
    average: Weights | None


class Pull(NamedTuple):
    """The loss, gradients and batch statistics of one batch.

    Attributes:
        loss: float32 [], mean loss of the batch.
        gradients: gradients of that loss, a pytree like the parameters; reduced over all devices.
        batch_stats: the model's new batch statistics.
    """

    loss: jax.Array
    gradients: Any
    batch_stats: Any


class Outcome(NamedTuple):
    """The result of one pull: whether an update was due, the loss, and the learning rate.

    Attributes:
        due: bool [], whether an update was due, made or skipped.
        gives_up: bool [], whether to leave the loop, because too many updates in a row were skipped.
        loss: float32 [], mean over the update's pulls so far.
        learning_rate: float32 [], learning rate of the update.
    """

    due: jax.Array
    gives_up: jax.Array
    loss: jax.Array
    learning_rate: jax.Array


def init_update(rule: UpdateRule, weights: Weights) -> UpdateState:
    """Return the state before the first pull; its structure depends only on the rule and the weights."""
    return UpdateState(
        opt_state=init_optimizer(rule.optimizer, weights.params),
        skips=init_skips(),
        gathered=init_accumulation((jnp.zeros(()), weights.params)) if rule.accumulates else None,
        average=init_average(weights) if rule.averages else None,
    )


def update_weights(
    rule: UpdateRule,
    weights: Weights,
    state: UpdateState,
    pull: Pull,
    step: jax.Array,
    values: UpdateValues,
) -> tuple[Weights, UpdateState, Outcome]:
    """Process one pull, and make the update if one is due.

    An update with a NaN or infinite gradient is skipped: parameters, moments and average are unchanged. Batch
    statistics are replaced by those of every pull whose statistics are finite, because one bad batch would spoil them
    for good.

    Args:
        rule: the static settings.
        weights: weights before the pull.
        state: state before the pull.
        pull: loss, gradients and statistics of the batch.
        step: int32 [], updates due before this pull; the caller adds `due` to it.
        values: the runtime values.

    Returns:
        The weights and the state after the pull, of the same structure and dtypes, and the outcome.
    """
    due, gathered = jnp.ones((), jnp.bool), None
    loss, gradients = pull.loss.astype(jnp.float32), pull.gradients
    if state.gathered is not None:
        (loss, gradients), due, gathered = accumulate(state.gathered, (loss, gradients), values.accumulate_steps)
    finite = has_finite_norm(gradients)
    made = due & finite

    hyperparams = hyperparams_at(rule, step, values)
    mask = every_leaf if rule.decay_all else kernels_only
    optimizer = make_optimizer(rule.optimizer, hyperparams, decay_mask=mask, made=made)
    updates, opt_state = optimizer.update(gradients, state.opt_state, weights.params)
    updated = Weights(
        choose(made, optax.apply_updates(weights.params, updates), weights.params),
        choose(all_finite(pull.batch_stats), pull.batch_stats, weights.batch_stats),
    )
    skips = count_skips(state.skips, due, finite)
    average = state.average
    if average is not None:
        moved = update_average(average, updated, values.average_decay, step, ramp=rule.average_ramp)
        average = choose(made, moved, average)
    outcome = Outcome(due, gives_up(skips, values.most_skips), loss, hyperparams.learning_rate)
    return updated, UpdateState(opt_state, skips, gathered, average), outcome


def hyperparams_at(rule: UpdateRule, step: jax.Array, values: UpdateValues) -> Hyperparams:
    """Return the hyperparameters at one step (int32 []), with the schedule's learning rate and momentum filled in."""
    hyperparams = values.hyperparams
    learning_rate = hyperparams.learning_rate * learning_rate_at(rule.schedule, step, values.schedule)
    momentum = momentum_at(step, values.schedule) if rule.cycle_momentum else hyperparams.momentum
    return hyperparams._replace(learning_rate=learning_rate, momentum=momentum)
