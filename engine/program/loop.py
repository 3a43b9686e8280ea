"""The training program: loops over updates, evaluations and snapshots, compiled as one function.

Owns the loops' carries. Reads batches through the infeed, emits losses through the outfeed, and
does not depend on files, threads or terminals.
"""

from collections.abc import Callable, Sequence
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
from loopfeed.engine.program.evaluate_split import evaluate_split
from loopfeed.engine.program.histograms import compute_histograms
from loopfeed.engine.program.observed import Observed, SeenImages, init_observed, named_leaves
from loopfeed.engine.program.pulls import for_each, pull_part
from loopfeed.engine.program.train_state import TrainModel, TrainState
from loopfeed.engine.program.train_step import train_step
from loopfeed.engine.scopes import LOSS, PUSH, SNAPSHOT, TRAIN, VALID
from loopfeed.engine.updates.reach import UNKNOWN, Reach
from loopfeed.engine.updates.selection import join_frozen, split_frozen
from loopfeed.engine.updates.settings import Cadence, CompiledSettings, RuntimeSettings
from loopfeed.engine.updates.skipping import choose
from loopfeed.engine.updates.update import Weights
from loopfeed.models.layers.bfloat16_bits import to_float32


class _Carry(NamedTuple):
    """The carry of the outer loops.

    Attributes:
        state: the training state.
        stopped: whether to leave the loops.
        snapshot: whether the host requested a snapshot after the current update.
        gradients: the gradient of the last update, None if it is not observed; where a stage trained nothing, older.
        images: what the last batch of each stage showed.
        reach: bounds of the weights.
        token: the token of the last crossing; all crossings are one chain, in the order of this file.
    """

    state: TrainState
    stopped: Bool[Array, ""]
    snapshot: Bool[Array, ""]
    gradients: Any
    images: tuple[SeenImages | None, ...]
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


class ProgramStage(NamedTuple):
    """What is compiled for one stage: its settings, and the images of its batches on each device."""

    settings: CompiledSettings
    num_rows: int


def make_program(
    model: TrainModel,
    settings: CompiledSettings,
    stages: Sequence[ProgramStage],
    infeed: BatchInfeed,
    outfeed: Outfeed,
    evaluation_infeed: BatchInfeed | None = None,
) -> Callable[[TrainState, RuntimeSettings], TrainState]:
    """Return the function that trains from start to end: (state, values) → the state after the last step.

    Args:
        model: the model to train.
        settings: the compiled settings of the run, with which it is evaluated.
        stages: its stages, at least one.
        infeed, outfeed: the crossings.
        evaluation_infeed: infeed of the validation batches, addressed by evaluation · batches + batch; None disables
            evaluation.
    """
    return _Program(model, settings, tuple(stages), infeed, outfeed, evaluation_infeed).train


@dataclass(frozen=True)
class _Program:
    """The nested loops, outermost first: segments (ending at an evaluation or a snapshot), pulls, and their batches.

    A segment has one loop over pulls for each stage, one after the other; those of other stages have no iterations.
    """

    model: TrainModel
    settings: CompiledSettings
    stages: tuple[ProgramStage, ...]
    infeed: BatchInfeed
    outfeed: Outfeed
    evaluation_infeed: BatchInfeed | None

    def train(self, state: TrainState, values: RuntimeSettings) -> TrainState:
        def continues(carry: _Carry) -> jax.Array:
            return ~carry.stopped & ~_is_done(carry.state, values)

        no = jnp.zeros((), jnp.bool)
        reach = jax.tree.map(jnp.asarray, UNKNOWN)
        gradients = init_observed(self.settings, state.params).gradients
        images = tuple(init_observed(stage.settings, state.params).images for stage in self.stages)
        start = _Carry(self._split_accumulated(state), no, no, gradients, images, reach, first_token())
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

        for number in range(len(self.stages)):
            carry = self._train_stage(number, values, boundary, carry)
        return self._push_snapshot(values, self._evaluate(values, self._push_observed(values, step_before, carry)))

    def _train_stage(self, number: int, values: RuntimeSettings, boundary: jax.Array, carry: _Carry) -> _Carry:
        """Train up to update `boundary`, or to the end of the stage; in any other stage, do nothing."""
        if number + 1 < len(self.stages):
            boundary = jnp.minimum(boundary, values.stages[number].stop_step)
        if self.settings.frozen_by_stage:
            # The bounds are those of the weights that the stage before trained.
            begins = carry.state.step == values.stages[number].first_step
            carry = carry._replace(reach=choose(begins, jax.tree.map(jnp.asarray, UNKNOWN), carry.reach))

        def continues(carry: _Carry) -> jax.Array:
            requested = (carry.state.owes_evaluation | carry.snapshot) & _is_between_updates(carry.state)
            return (carry.state.step < boundary) & ~carry.stopped & ~requested

        return lax.while_loop(continues, partial(self._one_pull, number, values.in_stage(number), boundary), carry)

    def _next_boundary(self, step: Int32[Array, ""], values: RuntimeSettings) -> Int32[Array, ""]:
        """Return the number of the update after which something is evaluated or pushed next."""
        cadences = [values.evaluations, values.snapshots]
        cadences += [values.histograms] if self.settings.histograms else []
        cadences += [] if self.settings.shown_images is None else [values.images]
        return reduce(jnp.minimum, (cadence.next_after(step, values.stop_step) for cadence in cadences))

    @jax.named_scope(TRAIN)
    def _one_pull(self, number: int, values: RuntimeSettings, boundary: jax.Array, carry: _Carry) -> _Carry:
        """Train on one pull's batches, up to update `boundary`, and emit the losses of the updates that were due."""
        infeed, (settings, num_rows) = self.infeed, self.stages[number]
        requested = carry.state.owes_evaluation | carry.snapshot
        num_wanted = _num_to_pull(jnp.where(requested, 0, boundary), carry.state, values, infeed.chunk)
        token, pulled = pull_part(infeed, carry.token, carry.state.batch_index, num_wanted, settings.replicas, num_rows)
        control = pulled.control
        token, chunk, num_taken = for_each(
            infeed,
            token,
            pulled,
            partial(self._train_on_batch, settings, values, control),
            _empty_chunk(carry, number, infeed.num_together, len(self.settings.objective.metrics)),
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
        gradients, seen = chunk.observed
        images = tuple(seen if each == number else own for each, own in enumerate(carry.images))
        return _Carry(state, stopped, snapshot, gradients, images, chunk.reach, token)

    def _train_on_batch(
        self,
        settings: CompiledSettings,
        values: RuntimeSettings,
        control: ControlWord,
        chunk: _ChunkCarry,
        batch: Batch,
    ) -> _ChunkCarry:
        """Train on the next batch of a pull."""
        state, outcome, metrics, images = train_step(
            self.model, settings, chunk.state, batch, control.learning_rate_factor, values, chunk.reach
        )
        with jax.named_scope(PUSH):
            numbers = jnp.stack([outcome.loss, outcome.learning_rate, *metrics.values()]).astype(jnp.float32)
            num_updates = chunk.num_updates + outcome.due.astype(jnp.int32)
            # If no update was due, the next one overwrites these numbers, or they are never emitted.
            numbers = lax.dynamic_update_index_in_dim(chunk.numbers, numbers, chunk.num_updates, axis=0)
        gradients = jax.tree.map(to_float32, outcome.gradients) if settings.histograms else None
        if settings.frozen_by_stage and settings.histograms:
            gradients = join_frozen(gradients, chunk.observed.gradients)
        return _ChunkCarry(
            state=state,
            num_updates=num_updates,
            numbers=numbers,
            gives_up=outcome.gives_up,
            observed=Observed(gradients, images),
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
        state, token = carry.state, carry.token

        def is_due(cadence: Cadence, number: int) -> jax.Array:
            due = (state.step > step_before) & cadence.is_due(state.step)
            if number and values.stages:
                due = due & (state.step > values.stages[number - 1].stop_step)
            if number + 1 < len(self.stages):
                due = due & (state.step <= values.stages[number].stop_step)
            return due

        for number, images in enumerate(carry.images):
            if carry.gradients is not None:
                gradients, _ = split_frozen(carry.gradients, self.stages[number].settings.frozen)
                leaves = named_leaves("weights", state.params) | named_leaves("gradients", gradients)
                push = partial(self._push_histograms, state.step, leaves)
                token = self.settings.replicas.on_first(push, token, is_due(values.histograms, number))
            if images is not None:
                push = partial(self._push_images, state.step, images)
                token = self.settings.replicas.on_first(push, token, is_due(values.images, number))
        return carry._replace(token=token)

    def _push_histograms(self, step: jax.Array, leaves: dict[str, jax.Array], token: Token) -> Token:
        return self.outfeed.push_histograms(token, step, list(leaves), compute_histograms(list(leaves.values())))

    def _push_images(self, step: jax.Array, images: SeenImages, token: Token) -> Token:
        return self.outfeed.push_images(token, step, *images)

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


def _empty_chunk(carry: _Carry, stage: int, num_together: int, num_metrics: int) -> _ChunkCarry:
    none = jnp.zeros((), jnp.int32)
    numbers = jnp.zeros((num_together, 2 + num_metrics), jnp.float32)
    return _ChunkCarry(
        carry.state, none, numbers, jnp.zeros((), jnp.bool), Observed(carry.gradients, carry.images[stage]), carry.reach
    )


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
