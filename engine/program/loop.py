"""The training program: loops over updates, evaluations and snapshots, compiled as one function.

Owns the loops' carries and the training step. Reads batches through the infeed, emits losses through the outfeed, and
does not depend on files, threads or terminals.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from loopfeed.engine.control.board import ControlWord
from loopfeed.engine.crossing.infeed import Batch, BatchInfeed
from loopfeed.engine.crossing.outfeed import Outfeed
from loopfeed.engine.crossing.token import Token, first_token
from loopfeed.engine.objective.patience import count_evaluation
from loopfeed.engine.objective.tally import Tally, empty_tally
from loopfeed.engine.program.augmented_batch import augment_batch
from loopfeed.engine.program.checked_model import model_keys
from loopfeed.engine.program.evaluate_split import evaluate_split
from loopfeed.engine.program.histograms import compute_histograms
from loopfeed.engine.program.observed import Observed, SeenImages, init_observed, named_leaves, observe_images
from loopfeed.engine.program.pulls import for_each, pull_part
from loopfeed.engine.program.train_state import TrainModel, TrainState
from loopfeed.engine.scopes import FORWARD, LOSS, OPT_STEP, PUSH, SNAPSHOT, TRAIN, VALID
from loopfeed.engine.updates.reach import UNKNOWN, Reach
from loopfeed.engine.updates.selection import join_frozen, keep_frozen, split_frozen
from loopfeed.engine.updates.settings import Cadence, CompiledSettings, RuntimeSettings
from loopfeed.engine.updates.skipping import choose
from loopfeed.engine.updates.update import Microbatch, Outcome, Weights, update_weights
from loopfeed.models.layers.batch_norm import normalising_over
from loopfeed.models.layers.bfloat16_bits import to_float32


class _Carry(NamedTuple):
    """The carry of the outer loops.

    Attributes:
        state: the training state.
        stopped: whether to leave the loops.
        snapshot: whether the host requested a snapshot after the current update.
        observed: what the last update showed.
        reach: bounds of the weights.
        token: the token of the last crossing; all crossings are one chain, in the order of this file.
    """

    state: TrainState
    stopped: Bool[Array, ""]
    snapshot: Bool[Array, ""]
    observed: Observed
    reach: Reach
    token: Token


class _ChunkCarry(NamedTuple):
    """The carry of the loop over the batches of one pull.

    Attributes:
        state: the training state.
        num_updates: updates that were due but whose losses are not emitted yet.
        numbers: loss, learning rate and metrics of each of these updates.
        gives_up: whether to leave the loops, because too many updates in a row were skipped.
        observed: what the last update showed.
        reach: bounds of the weights.
    """

    state: TrainState
    num_updates: Int32[Array, ""]
    numbers: Float32[Array, "n columns"]
    gives_up: Bool[Array, ""]
    observed: Observed
    reach: Reach


def make_program(
    model: TrainModel,
    settings: CompiledSettings,
    infeed: BatchInfeed,
    outfeed: Outfeed,
    evaluation_infeed: BatchInfeed | None = None,
) -> Callable[[TrainState, RuntimeSettings], TrainState]:
    """Return the function that trains from start to end: (state, values) → the state after the last step.

    Args:
        model: the model to train.
        settings: the compiled settings.
        infeed, outfeed: the crossings.
        evaluation_infeed: infeed of the validation batches, addressed by evaluation · batches + batch; None disables
            evaluation.
    """
    return _Program(model, settings, infeed, outfeed, evaluation_infeed).train


@dataclass(frozen=True)
class _Program:
    """The nested loops, outermost first: segments (ending at an evaluation or a snapshot), pulls, and their batches."""

    model: TrainModel
    settings: CompiledSettings
    infeed: BatchInfeed
    outfeed: Outfeed
    evaluation_infeed: BatchInfeed | None

    def train(self, state: TrainState, values: RuntimeSettings) -> TrainState:
        def continues(carry: _Carry) -> jax.Array:
            return ~carry.stopped & ~_is_done(carry.state, values)

        no = jnp.zeros((), jnp.bool)
        reach = jax.tree.map(jnp.asarray, UNKNOWN)
        start = _Carry(
            self._split_accumulated(state), no, no, init_observed(self.settings, state.params), reach, first_token()
        )
        return self._join_accumulated(lax.while_loop(continues, partial(self._segment, values), start).state)

    def _split_accumulated(self, state: TrainState) -> TrainState:
        """Give each device its part of what was gathered for the next update before this launch.

        The mean of equal sums is the sum; of the metrics, the first device keeps the states.
        """
        replicas, metrics = self.settings.replicas, state.metrics
        if metrics is None or replicas.count == 1:
            return state
        return state._replace(
            metrics=choose(replicas.this_device() == 0, metrics, self.settings.objective.init_metrics())
        )

    def _join_accumulated(self, state: TrainState) -> TrainState:
        """Make equal on all devices what each gathered for the next update, in a run that stops between two updates."""
        replicas, accumulated = self.settings.replicas, state.update.accumulated
        if accumulated is None or replicas.count == 1:
            return state
        sums, batch_stats = replicas.mean((accumulated.sums, state.batch_stats))
        metrics = state.metrics
        if metrics is not None:
            metrics = replicas.merge(self.settings.objective.merge_metrics, metrics)
        update = state.update._replace(accumulated=accumulated._replace(sums=sums))
        return state._replace(update=update, batch_stats=batch_stats, metrics=metrics)

    def _segment(self, values: RuntimeSettings, carry: _Carry) -> _Carry:
        """Train up to the next step at which something is pushed or evaluated, then do whatever is due."""
        step_before = carry.state.step
        boundary = self._next_boundary(carry.state.step, values)

        def continues(carry: _Carry) -> jax.Array:
            requested = (carry.state.owes_evaluation | carry.snapshot) & _is_between_updates(carry.state)
            return (carry.state.step < boundary) & ~carry.stopped & ~requested

        carry = lax.while_loop(continues, partial(self._one_pull, values, boundary), carry)
        return self._push_snapshot(values, self._evaluate(values, self._push_observed(values, step_before, carry)))

    def _next_boundary(self, step: Int32[Array, ""], values: RuntimeSettings) -> Int32[Array, ""]:
        """Return the number of the update after which something is evaluated or pushed next."""
        cadences = [values.evaluations, values.snapshots]
        cadences += [values.histograms] if self.settings.histograms else []
        cadences += [] if self.settings.shown_images is None else [values.images]
        return reduce(jnp.minimum, (cadence.next_after(step, values.stop_step) for cadence in cadences))

    @jax.named_scope(TRAIN)
    def _one_pull(self, values: RuntimeSettings, boundary: jax.Array, carry: _Carry) -> _Carry:
        """Train on one pull's batches, up to update `boundary`, and emit the losses of the updates that were due."""
        requested = carry.state.owes_evaluation | carry.snapshot
        num_wanted = _num_to_pull(jnp.where(requested, 0, boundary), carry.state, values, self.infeed.chunk)
        token, pulled = pull_part(self.infeed, carry.token, carry.state.batch_index, num_wanted, self.settings.replicas)
        control = pulled.control
        token, chunk, num_taken = for_each(
            self.infeed,
            token,
            pulled,
            partial(self._train_on_batch, values, control),
            _empty_chunk(carry, self.infeed.num_together, len(self.settings.objective.metrics)),
            is_over=lambda chunk: chunk.gives_up,
            emit=self._push_losses,
        )
        state = chunk.state
        # If no batch of the pull was processed, a launch that resumes here receives the requests of the pull again.
        is_heeded = num_taken > 0
        if self.evaluation_infeed is not None:
            state = state._replace(owes_evaluation=state.owes_evaluation | (control.evaluate & is_heeded))
        stopped = control.stop | chunk.gives_up | (num_taken < control.num_batches)
        snapshot = carry.snapshot | (control.snapshot & is_heeded)
        return _Carry(state, stopped, snapshot, chunk.observed, chunk.reach, token)

    def _train_on_batch(
        self, values: RuntimeSettings, control: ControlWord, chunk: _ChunkCarry, batch: Batch
    ) -> _ChunkCarry:
        """Train on the next batch of a pull."""
        state, outcome, metrics, images = train_step(
            self.model, self.settings, chunk.state, batch, control.learning_rate_factor, values, chunk.reach
        )
        with jax.named_scope(PUSH):
            numbers = jnp.stack([outcome.loss, outcome.learning_rate, *metrics.values()]).astype(jnp.float32)
            num_updates = chunk.num_updates + outcome.due.astype(jnp.int32)
            # If no update was due, the next one overwrites these numbers, or they are never emitted.
            numbers = lax.dynamic_update_index_in_dim(chunk.numbers, numbers, chunk.num_updates, axis=0)
        return _ChunkCarry(
            state=state,
            num_updates=num_updates,
            numbers=numbers,
            gives_up=outcome.gives_up,
            observed=Observed(
                jax.tree.map(to_float32, outcome.gradients) if self.settings.histograms else None, images
            ),
            reach=outcome.reach,
        )

    @jax.named_scope(PUSH)
    def _push_losses(self, token: Token, chunk: _ChunkCarry) -> tuple[Token, _ChunkCarry]:
        names = tuple(self.settings.objective.metrics)
        token = self.settings.replicas.on_first(
            lambda token: self.outfeed.push_losses(token, chunk.state.step, chunk.num_updates, chunk.numbers, names),
            token,
        )
        return token, chunk._replace(num_updates=jnp.zeros_like(chunk.num_updates))

    @jax.named_scope(TRAIN)
    @jax.named_scope(PUSH)
    def _push_observed(self, values: RuntimeSettings, step_before: jax.Array, carry: _Carry) -> _Carry:
        """Emit histograms and images if they are due after the last update since `step_before`."""
        state, (gradients, images), token = carry.state, carry.observed, carry.token

        def is_due(cadence: Cadence) -> jax.Array:
            return (state.step > step_before) & cadence.is_due(state.step)

        if gradients is not None:
            leaves = named_leaves("weights", state.params) | named_leaves("gradients", gradients)
            token = self.settings.replicas.on_first(
                lambda token: self.outfeed.push_histograms(
                    token, state.step, list(leaves), compute_histograms(list(leaves.values()))
                ),
                token,
                is_due(values.histograms),
            )
        if images is not None:
            token = self.settings.replicas.on_first(
                lambda token: self.outfeed.push_images(token, state.step, *images),
                token,
                is_due(values.images),
            )
        return carry._replace(token=token)

    @jax.named_scope(VALID)
    def _evaluate(self, values: RuntimeSettings, carry: _Carry) -> _Carry:
        """Evaluate if an evaluation is due; an evaluation that a stop interrupts stays due."""
        infeed = self.evaluation_infeed
        if infeed is None:
            return carry
        state = carry.state
        on_time = (state.step >= values.stop_step) | values.evaluations.is_due(state.step)
        due = ~carry.stopped & (state.owes_evaluation | on_time)

        def evaluate(token: Token, weights: Weights) -> tuple[Token, Tally, jax.Array]:
            num_batches = values.num_eval_batches
            first_batch = state.num_evaluations * num_batches
            return evaluate_split(
                self.model, self.settings, weights, infeed, token, first_batch, num_batches, values.scale
            )

        none = empty_tally(objective=self.settings.evaluated_objective), jnp.zeros((), jnp.bool)
        token, tally, is_interrupted = lax.cond(
            due, evaluate, lambda token, _: (token, *none), carry.token, state.evaluated
        )
        done = due & ~is_interrupted
        with jax.named_scope(LOSS):
            metrics = self.settings.evaluated_objective.finish_metrics(tally.metrics)
        with jax.named_scope(PUSH):
            token = self.settings.replicas.on_first(
                lambda token: self.outfeed.push_evaluation(token, state.step, tally, metrics), token, done
            )
        correct = jnp.zeros((), jnp.int32) if tally.top1 is None else tally.top1
        top1 = correct.astype(jnp.float32) / jnp.maximum(tally.num_images, 1).astype(jnp.float32)
        state = state._replace(
            owes_evaluation=(due & is_interrupted) | (carry.stopped & state.owes_evaluation),
            num_evaluations=state.num_evaluations + done.astype(jnp.int32),
            top1=jnp.where(done, top1, state.top1),
        )
        if state.patience is not None and (metric := self.settings.stop_metric) is not None:
            state = state._replace(patience=count_evaluation(state.patience, metric, tally, metrics, done))
        return carry._replace(state=state, stopped=carry.stopped | is_interrupted, token=token)

    def _push_snapshot(self, values: RuntimeSettings, carry: _Carry) -> _Carry:
        """Emit the state if a snapshot is due, except at the end of the run, when the host receives it anyway."""
        state = carry.state
        wanted = carry.snapshot | values.snapshots.is_due(state.step)
        due = wanted & ~carry.stopped & ~_is_done(state, values)
        with jax.named_scope(TRAIN), jax.named_scope(SNAPSHOT):
            token = self.settings.replicas.on_first(
                lambda token: self.outfeed.push_snapshot(token, state.step, state.batch_index, state), carry.token, due
            )
        return carry._replace(snapshot=jnp.zeros((), jnp.bool), token=token)


def _empty_chunk(carry: _Carry, num_together: int, num_metrics: int) -> _ChunkCarry:
    none = jnp.zeros((), jnp.int32)
    numbers = jnp.zeros((num_together, 2 + num_metrics), jnp.float32)
    return _ChunkCarry(carry.state, none, numbers, jnp.zeros((), jnp.bool), carry.observed, carry.reach)


def _num_to_pull(
    boundary: Int32[Array, ""], state: TrainState, values: RuntimeSettings, chunk: int
) -> Int32[Array, ""]:
    """Return how many batches to pull: enough to reach update `boundary`, but at most one chunk.

    If the boundary is not ahead, the pull still reaches the next update.
    """
    if chunk == 1:
        return jnp.ones((), jnp.int32)
    num_updates = jnp.clip(boundary - state.step, 1, chunk)
    accumulated = state.update.accumulated
    if accumulated is None:
        return num_updates
    first = jnp.maximum(values.accumulate_steps - accumulated.num_batches, 1)
    return jnp.minimum(first + (num_updates - 1) * values.accumulate_steps, chunk)


def _is_done(state: TrainState, values: RuntimeSettings) -> Bool[Array, ""]:
    """Return whether the run is over: all steps and due evaluations are done, or an evaluation has ended it."""
    done = ((state.step >= values.stop_step) & ~state.owes_evaluation) | (state.top1 >= values.stop_at_top1)
    if state.patience is None or values.stop_patience is None:
        return done
    return done | (state.patience.num_worse >= values.stop_patience)


def _is_between_updates(state: TrainState) -> jax.Array:
    accumulated = state.update.accumulated
    return jnp.ones((), jnp.bool) if accumulated is None else accumulated.num_batches == 0


def train_step(
    model: TrainModel,
    settings: CompiledSettings,
    state: TrainState,
    batch: Batch,
    learning_rate_factor: Float32[Array, ""],
    values: RuntimeSettings,
    reach: Reach = UNKNOWN,
) -> tuple[TrainState, Outcome, dict[str, jax.Array], SeenImages | None]:
    """Train on one batch: augment it, run the forward and backward passes, and make an update if one is due.

    Args:
        model: the model to train.
        settings: the compiled settings.
        state: the state before the batch.
        batch: the images and their labels.
        learning_rate_factor: multiplies the schedule's learning rate.
        values: the runtime settings.
        reach: bounds of the weights, see `update_weights`.

    Returns:
        The new state, the outcome of the batch, the metrics over the batches of the update so far, and the images that
        are observed.
    """
    images, mix_weight, at = augment_batch(settings, batch, state.batch_index, values)
    keys = {"key": model_keys(values.seed_words, at)} if settings.takes_key else {}

    trained, frozen = split_frozen(state.params, settings.frozen)

    def loss_of(trained: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        params = join_frozen(trained, frozen)
        with jax.named_scope(FORWARD), normalising_over(settings.norm_groups):
            outputs, batch_stats = model.apply(params, state.batch_stats, images, train=True, **keys)
        with jax.named_scope(LOSS):
            loss = settings.objective.training_loss(outputs, batch.labels, mix_weight, values.smoothing)
        return loss, (batch_stats, outputs)

    (loss, (batch_stats, outputs)), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
    with jax.named_scope(LOSS):
        metrics = settings.objective.training_metrics(outputs, batch.labels)
    batch_stats = keep_frozen(batch_stats, state.batch_stats, settings.frozen)
    hyperparams = values.hyperparams
    factor = hyperparams.learning_rate * learning_rate_factor
    with jax.named_scope(OPT_STEP):
        (params, batch_stats), update, outcome = update_weights(
            settings,
            Weights(state.params, state.batch_stats),
            state.update,
            Microbatch(loss, gradients, batch_stats),
            state.step,
            values._replace(hyperparams=hyperparams._replace(learning_rate=factor)),
            reach,
        )
    step = state.step + outcome.due.astype(jnp.int32)
    accumulated, finished = _finish_metrics(settings, state.metrics, metrics, outcome.due)
    state = state._replace(
        batch_index=state.batch_index + 1,
        step=step,
        params=params,
        batch_stats=batch_stats,
        update=update,
        metrics=accumulated,
    )
    labels = batch.labels if settings.objective.has_classes else None
    with jax.named_scope(PUSH):
        seen = observe_images(settings, images, labels, mix_weight, values.scale)
    return state, outcome, finished, seen


@jax.named_scope(LOSS)
def _finish_metrics(
    settings: CompiledSettings, accumulated: Any, metrics: dict[str, Any], due: Bool[Array, ""]
) -> tuple[Any, dict[str, jax.Array]]:
    """Return the states of the metrics to keep for the next batch, and the metrics over the update's batches so far."""
    objective = settings.objective
    if accumulated is not None:
        metrics = objective.merge_metrics(accumulated, metrics)
        accumulated = choose(due, objective.init_metrics(), metrics)
    metrics = settings.replicas.merge_if(due, objective.merge_metrics, metrics)
    return accumulated, objective.finish_metrics(metrics)
