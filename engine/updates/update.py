"""What the gradients of one pull do to the weights: gather, clip, update or skip, average.

Owns the part of the loop's carry that only updates read or write. Knows nothing of batches, models or the loop.

One turn of the loop takes one batch, a *pull*; every `accumulate_steps`-th pull ends in an update that is *due*, and
`step` counts these. So what addresses the data is the number of pulls, and what addresses the schedule, the loss lines
and the run's length is `step`. An update refused for its gradient is done with, too: it counts as a step, takes its
place in the schedule and has its batches behind it, so that the order of the data depends on the position alone. The
two numbers are tied, pulls = step · accumulate_steps + gathered.num_pulls, as long as accumulate_steps stays the same.
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
    """What is compiled into the program.

    Attributes:
        optimizer, schedule: by name.
        decay_all: decay norms and biases as well as kernels.
        cycle_momentum: take the momentum from `momentum_at` in place of the hyperparameters'.
        accumulates: gather gradients over `UpdateValues.accumulate_steps` pulls; without it each pull is an update,
            and no memory is kept for sums.
        averages: keep an exponential moving average of the weights.
        average_ramp: let it follow faster at first.
    """

    optimizer: OptimizerName = "sgd"
    schedule: ScheduleName = "constant"
    decay_all: bool = False
    cycle_momentum: bool = False
    accumulates: bool = False
    averages: bool = False
    average_ramp: bool = True


class UpdateValues(NamedTuple):
    """What a run may change without another compilation.

    Attributes:
        hyperparams: the optimiser's; their learning rate is a factor on the schedule's, 1 to take that as it is.
        schedule: the schedule's numbers.
        accumulate_steps: int32 [], pulls for an update; read where the rule accumulates.
        average_decay: float32 [] in 0 … 1; read where the rule averages.
        most_skips: int32 [], refused updates in a row that the run bears.
    """

    hyperparams: Hyperparams
    schedule: ScheduleValues
    accumulate_steps: jax.Array
    average_decay: jax.Array
    most_skips: jax.Array


class Weights(NamedTuple):
    """A model's params and batch_stats, pytrees of arrays."""

    params: Any
    batch_stats: Any


class UpdateState(NamedTuple):
    """What updates remember; a part of the loop's carry, all of it needed to resume.

    Attributes:
        opt_state: the optimiser's moments, float32.
        skips: how many updates were refused.
        gathered: sums since the last update, None where the rule does not accumulate.
        average: `Weights` in float32, None where the rule keeps none.
    """

    opt_state: optax.OptState
    skips: Skips
    gathered: Accumulation | None
    average: Weights | None


class Pull(NamedTuple):
    """What one batch gave.

    Attributes:
        loss: float32 [], its mean loss.
        gradients: of that loss, a pytree like the parameters; reduced over all devices.
        batch_stats: the model's new ones.
    """

    loss: jax.Array
    gradients: Any
    batch_stats: Any


class Outcome(NamedTuple):
    """What one pull came to.

    Attributes:
        due: bool [], whether it ended in an update, made or refused.
        gives_up: bool [], whether too many in a row were refused: leave the loop.
        loss: float32 [], the mean over the update's pulls so far.
        learning_rate: float32 [], of the update.
    """

    due: jax.Array
    gives_up: jax.Array
    loss: jax.Array
    learning_rate: jax.Array


def init_update(rule: UpdateRule, weights: Weights) -> UpdateState:
    """Gives the state before the first pull; its structure comes from the rule and the weights alone."""
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
    """Takes in one pull, and makes the update where one is due.

    An update whose gradient is not finite is skipped: parameters, moments and average stay as they are. Batch
    statistics are taken from every pull that gave finite ones, as one bad batch would spoil them for good.

    Args:
        rule: static.
        weights: before the pull.
        state: before the pull.
        pull: the batch's loss, gradients and statistics.
        step: int32 [], updates due before this pull; the caller adds `due` to it.
        values: the numbers.

    Returns:
        The weights and the state after the pull, types and structure kept, and what it came to.
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
    """Gives the optimiser's numbers at one step (int32 []): the schedule's rate and momentum filled in."""
    hyperparams = values.hyperparams
    rate = hyperparams.learning_rate * learning_rate_at(rule.schedule, step, values.schedule)
    momentum = momentum_at(step, values.schedule) if rule.cycle_momentum else hyperparams.momentum
    return hyperparams._replace(learning_rate=rate, momentum=momentum)
