"""The training program: the project's only `while_loop`s.

Owns the loops' carries and what one step is. Reads batches through the infeed, emits losses through the outfeed, and
knows nothing of files, threads or terminals.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from engine.control.word import ControlWord
from engine.crossing.infeed import Batch, BatchInfeed
from engine.crossing.outfeed import Outfeed
from engine.images.augment import augment_images, make_targets, prepare_for_evaluation
from engine.images.positions import positions
from engine.images.unpack import PixelScale
from engine.objective.cross_entropy import cross_entropy
from engine.objective.tally import Tally, empty_tally, tally_batch
from engine.objective.targets import smooth_targets
from engine.program.statics import Statics
from engine.program.train_state import RunValues, TrainModel, TrainState
from engine.updates.update import Outcome, Pull, UpdateValues, Weights, update_weights


class _Carry(NamedTuple):
    """What the loops carry beside the state.

    Attributes:
        state: of the training.
        stopped: bool [], leave the loops.
        snapshot: bool [], the host asks for a snapshot after the update under way.
    """

    state: TrainState
    stopped: jax.Array
    snapshot: jax.Array


class _Made(NamedTuple):
    """What the loop over the batches of one pull carries.

    Attributes:
        state: of the training.
        num_updates: int32 [], updates that were due and whose losses were not emitted yet.
        numbers: float32 [n, 2], the loss and the learning rate of each of them.
        gives_up: bool [], leave the loops.
    """

    state: TrainState
    num_updates: jax.Array
    numbers: jax.Array
    gives_up: jax.Array


def make_program(
    model: TrainModel,
    statics: Statics,
    infeed: BatchInfeed,
    outfeed: Outfeed,
    evaluation_infeed: BatchInfeed | None = None,
) -> Callable[[TrainState, RunValues], TrainState]:
    """Builds the whole-training function, to be compiled once: (state, values) → the state after the last step.

    Args:
        model: what is trained.
        statics: how.
        infeed, outfeed: the crossings.
        evaluation_infeed: of the validation batches, pulled by (evaluation · batches + batch); None evaluates never.
    """
    return _Program(model, statics, infeed, outfeed, evaluation_infeed).train


@dataclass(frozen=True)
class _Program:
    """The loops, from the outside in: segments between evaluations, pulls, and what one pull does."""

    model: TrainModel
    statics: Statics
    infeed: BatchInfeed
    outfeed: Outfeed
    evaluation_infeed: BatchInfeed | None

    def train(self, state: TrainState, values: RunValues) -> TrainState:
        def goes_on(carry: _Carry) -> jax.Array:
            return ~carry.stopped & ~_is_done(carry.state, values)

        no = jnp.zeros((), jnp.bool)
        start = _Carry(state, no, no)
        return lax.while_loop(goes_on, partial(self._segment, values), start).state

    def _segment(self, values: RunValues, carry: _Carry) -> _Carry:
        """The steps up to the next evaluation or snapshot, and that; a snapshot follows an evaluation of its step."""
        boundary = _next_boundary(carry.state.step, values)

        def goes_on(carry: _Carry) -> jax.Array:
            asked = (carry.state.owes_evaluation | carry.snapshot) & _is_between_updates(carry.state)
            return (carry.state.step < boundary) & ~carry.stopped & ~asked

        carry = lax.while_loop(goes_on, partial(self._one_pull, values, boundary), carry)
        return self._push_snapshot(values, self._evaluate(values, carry))

    def _one_pull(self, values: RunValues, boundary: jax.Array, carry: _Carry) -> _Carry:
        """Trains on what one pull brings, none of it beyond the boundary, and emits the losses of its updates."""
        asked = carry.state.owes_evaluation | carry.snapshot
        num_wanted = _pulls_to(jnp.where(asked, 0, boundary), carry.state, values.update, self.infeed.chunk)
        pulled = self.infeed.pull(carry.state.pulls, jnp.zeros((), jnp.int32), num_wanted)
        control = pulled.control
        made, num_taken = self.infeed.for_each(
            pulled,
            partial(self._take_in, values, control),
            _nothing_made(carry.state, self.infeed.num_together),
            is_over=lambda made: made.gives_up,
            emit=self._push_losses,
        )
        state = made.state
        # What came with a pull of which nothing was taken in after all comes again with the pull of whoever goes on.
        is_heeded = num_taken > 0
        if self.evaluation_infeed is not None:
            state = state._replace(owes_evaluation=state.owes_evaluation | (control.evaluate & is_heeded))
        stopped = control.stop | made.gives_up | (num_taken < control.num_batches)
        return _Carry(state, stopped, carry.snapshot | (control.snapshot & is_heeded))

    def _take_in(self, values: RunValues, control: ControlWord, made: _Made, batch: Batch) -> _Made:
        """Trains on the next batch of a pull."""
        state, outcome = train_step(self.model, self.statics, made.state, batch, control.learning_rate_factor, values)
        numbers = jnp.stack([outcome.loss, outcome.learning_rate])
        # Where no update was due the next one, or nobody, takes the place.
        return _Made(
            state=state,
            num_updates=made.num_updates + outcome.due.astype(jnp.int32),
            numbers=lax.dynamic_update_index_in_dim(made.numbers, numbers, made.num_updates, axis=0),
            gives_up=outcome.gives_up,
        )

    def _push_losses(self, made: _Made) -> _Made:
        self.outfeed.push_losses(made.state.step, made.num_updates, made.numbers)
        return made._replace(num_updates=jnp.zeros_like(made.num_updates))

    def _evaluate(self, values: RunValues, carry: _Carry) -> _Carry:
        """Evaluates where that is due; what a stop cuts short stays due."""
        infeed = self.evaluation_infeed
        if infeed is None:
            return carry
        state = carry.state
        every = values.eval_every_steps
        on_time = (state.step >= values.stop_step) | _is_multiple(state.step, every)
        due = ~carry.stopped & (state.owes_evaluation | on_time)

        def evaluate(weights: Weights) -> tuple[Tally, jax.Array]:
            num_batches = values.num_eval_batches
            first_pull = state.num_evaluations * num_batches
            return evaluate_split(self.model, self.statics, weights, infeed, first_pull, num_batches, values.scale)

        none = empty_tally(), jnp.zeros((), jnp.bool)
        tally, is_cut_short = lax.cond(due, evaluate, lambda _: none, state.evaluated)
        done = due & ~is_cut_short
        lax.cond(done, lambda: self.outfeed.push_evaluation(state.step, tally), lambda: None)
        top1 = tally.top1.astype(jnp.float32) / jnp.maximum(tally.num_images, 1).astype(jnp.float32)
        state = state._replace(
            owes_evaluation=(due & is_cut_short) | (carry.stopped & state.owes_evaluation),
            num_evaluations=state.num_evaluations + done.astype(jnp.int32),
            top1=jnp.where(done, top1, state.top1),
        )
        return carry._replace(state=state, stopped=carry.stopped | is_cut_short)

    def _push_snapshot(self, values: RunValues, carry: _Carry) -> _Carry:
        """Pushes the state where that is due; the last one of a run is for the host, which gets it anyway."""
        state = carry.state
        asked = carry.snapshot | _is_multiple(state.step, values.snapshot_every_steps)
        due = asked & ~carry.stopped & ~_is_done(state, values)
        lax.cond(due, lambda: self.outfeed.push_snapshot(state.step, state.pulls, state), lambda: None)
        return carry._replace(snapshot=jnp.zeros((), jnp.bool))


def _nothing_made(state: TrainState, num_together: int) -> _Made:
    none = jnp.zeros((), jnp.int32)
    return _Made(state, none, jnp.zeros((num_together, 2), jnp.float32), jnp.zeros((), jnp.bool))


def _pulls_to(boundary: jax.Array, state: TrainState, values: UpdateValues, chunk: int) -> jax.Array:
    """How many batches to pull at once, int32 []: a chunk, or fewer, up to the next update or that of `boundary`."""
    if chunk == 1:
        return jnp.ones((), jnp.int32)
    num_updates = jnp.clip(boundary - state.step, 1, chunk)
    gathered = state.update.gathered
    if gathered is None:
        return num_updates
    first = jnp.maximum(values.accumulate_steps - gathered.num_pulls, 1)
    return jnp.minimum(first + (num_updates - 1) * values.accumulate_steps, chunk)


def _is_done(state: TrainState, values: RunValues) -> jax.Array:
    """Whether a run ends of its own accord, bool []: its steps are made, and no evaluation is due any more."""
    return ((state.step >= values.stop_step) & ~state.owes_evaluation) | (state.top1 >= values.stop_at_top1)


def _is_between_updates(state: TrainState) -> jax.Array:
    gathered = state.update.gathered
    return jnp.ones((), jnp.bool) if gathered is None else gathered.num_pulls == 0


def _is_multiple(step: jax.Array, every: jax.Array) -> jax.Array:
    return (every > 0) & (step % jnp.maximum(every, 1) == 0)


def _next_boundary(step: jax.Array, values: RunValues) -> jax.Array:
    """The updates after which the next evaluation or snapshot is due, int32 []."""

    def following(every: jax.Array) -> jax.Array:
        multiple = (step // jnp.maximum(every, 1) + 1) * every
        # Beyond the last int32 a product turns negative.
        return jnp.where(multiple > step, jnp.minimum(multiple, values.stop_step), values.stop_step)

    return jnp.minimum(following(values.eval_every_steps), following(values.snapshot_every_steps))


def evaluate_split(
    model: TrainModel,
    statics: Statics,
    weights: Weights,
    infeed: BatchInfeed,
    first_pull: jax.Array,
    num_batches: jax.Array,
    scale: PixelScale,
    *,
    start: Tally | None = None,
) -> tuple[Tally, jax.Array]:
    """Counts a whole split with the running statistics.

    Args:
        model: what is evaluated.
        statics: says how large the images are that it is trained on, and whether their mirror images are looked at.
        weights: its parameters and statistics.
        infeed: of the split's batches.
        first_pull: int32 [], the address of the first.
        num_batches: int32 [], how many.
        scale: of the pixels.
        start: the tally before the first batch; None: one without classes.

    Returns:
        The tally, and whether the host asked for a stop, in which case the tally is not whole (bool []).
    """

    def goes_on(carry: tuple[jax.Array, jax.Array, Tally]) -> jax.Array:
        batch, stopped, _ = carry
        return (batch < num_batches) & ~stopped

    def one_pull(carry: tuple[jax.Array, jax.Array, Tally]) -> tuple[jax.Array, jax.Array, Tally]:
        batch, _, tally = carry
        num_wanted = jnp.minimum(num_batches - batch, infeed.chunk)
        pulled = infeed.pull(first_pull + batch, jnp.zeros((), jnp.int32), num_wanted)
        tally, num_taken = infeed.for_each(pulled, count, tally)
        return batch + num_taken, num_taken < num_wanted, tally

    def count(tally: Tally, batch: Batch) -> Tally:
        images = prepare_for_evaluation(batch.pixels, statics.augmentation.size, scale)
        if statics.eval_mirror:
            images = jnp.concatenate([images, images[:, :, ::-1]])
        logits, _ = model.apply(weights.params, weights.batch_stats, images, train=False)
        if statics.eval_mirror:
            logits = logits.astype(jnp.float32).reshape(2, len(batch.labels), -1).mean(0)
        return tally_batch(tally, logits, batch.labels)

    before = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.bool), start or empty_tally()
    _, stopped, tally = lax.while_loop(goes_on, one_pull, before)
    return tally, stopped


def train_step(
    model: TrainModel,
    statics: Statics,
    state: TrainState,
    batch: Batch,
    learning_rate_factor: jax.Array,
    values: RunValues,
) -> tuple[TrainState, Outcome]:
    """Takes in one batch: augment, forward, backward, and the update where one is due.

    Args:
        model: what is trained.
        statics: how.
        state: before it.
        batch: the images and their labels.
        learning_rate_factor: float32 [], multiplies the schedule's rate.
        values: the run's numbers.

    Returns:
        The new state, and what the batch came to.
    """
    num_images = len(batch.labels)
    at = positions(state.pulls, num_images, 0, num_images)
    images, own_share = augment_images(statics.augmentation, batch.pixels, at, values.seed_words, values.scale)

    def loss_of(params: Any) -> tuple[jax.Array, Any]:
        logits, batch_stats = model.apply(params, state.batch_stats, images, train=True)
        targets = make_targets(batch.labels, own_share, logits.shape[-1])
        return cross_entropy(logits, smooth_targets(targets, values.smoothing)), batch_stats

    (loss, batch_stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    hyperparams = values.update.hyperparams
    factor = hyperparams.learning_rate * learning_rate_factor
    (params, batch_stats), update, outcome = update_weights(
        statics.rule,
        Weights(state.params, state.batch_stats),
        state.update,
        Pull(loss, gradients, batch_stats),
        state.step,
        values.update._replace(hyperparams=hyperparams._replace(learning_rate=factor)),
    )
    step = state.step + outcome.due.astype(jnp.int32)
    return state._replace(
        pulls=state.pulls + 1, step=step, params=params, batch_stats=batch_stats, update=update
    ), outcome
