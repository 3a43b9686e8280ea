"""The training program: the project's only `while_loop`s.

Owns the loops' carries and what one step is. Reads batches through the infeed, emits losses through the outfeed, and
knows nothing of files, threads or terminals.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax

from engine.evaluation import Tally, empty_tally, tally_batch
from engine.infeed import Infeed, Pulled
from engine.objective import cross_entropy
from engine.optim import Hyperparams, sgd
from engine.outfeed import Outfeed
from engine.unpack import PixelScale, unpack_pixels


class TrainModel(Protocol):
    """What the program asks of a model; `models.model.Model` is one."""

    @property
    def init(self) -> Callable[[jax.Array], tuple[Any, Any]]:
        """PRNG key → (params, batch_stats), pytrees of arrays."""
        ...

    @property
    def apply(self) -> Callable[..., tuple[jax.Array, Any]]:
        """(params, batch_stats, images float32 [B, H, W, 3], train=bool) → (logits [B, K], new batch_stats)."""
        ...


class TrainState(NamedTuple):
    """The carry of the loop: everything that a later step depends on.

    Attributes:
        step: int32 [], updates done.
        params, batch_stats: the model's pytrees.
        opt_state: the optimiser's.
    """

    step: jax.Array
    params: Any
    batch_stats: Any
    opt_state: optax.OptState


class RunValues(NamedTuple):
    """What a run may change without another compilation.

    Attributes:
        stop_step: int32 [], leave the loop when so many updates are done.
        eval_every_steps: int32 [], evaluate when the updates done are a multiple of it, and at the end; 0: at the end.
        num_eval_batches: int32 [], pulls of one evaluation.
        hyperparams: of the optimiser.
        scale: of the pixels.
    """

    stop_step: jax.Array
    eval_every_steps: jax.Array
    num_eval_batches: jax.Array
    hyperparams: Hyperparams
    scale: PixelScale


def init_state(model: TrainModel, key: jax.Array) -> TrainState:
    """Draws the state before the first step."""
    params, batch_stats = model.init(key)
    # The numbers do not matter here: only the state's shape comes from them.
    optimizer = sgd(Hyperparams(*(jnp.zeros((), jnp.float32) for _ in Hyperparams._fields)))
    return TrainState(jnp.zeros((), jnp.int32), params, batch_stats, optimizer.init(params))


class _Carry(NamedTuple):
    """What the loops carry beside the state.

    Attributes:
        state: of the training.
        stopped: bool [], leave the loops.
        evaluate: bool [], the host asks for an evaluation after this step.
        num_evaluations: int32 [], begun so far; addresses the evaluation infeed.
    """

    state: TrainState
    stopped: jax.Array
    evaluate: jax.Array
    num_evaluations: jax.Array


def make_program(
    model: TrainModel, infeed: Infeed, outfeed: Outfeed, evaluation_infeed: Infeed | None = None
) -> Callable[[TrainState, RunValues], TrainState]:
    """Builds the whole-training function, to be compiled once: (state, values) → the state after the last step.

    Args:
        model: what is trained.
        infeed, outfeed: the crossings.
        evaluation_infeed: of the validation batches, pulled by (evaluation · batches + batch); None evaluates never.
    """

    def train(state: TrainState, values: RunValues) -> TrainState:
        def goes_on(carry: _Carry) -> jax.Array:
            return (carry.state.step < values.stop_step) & ~carry.stopped

        def segment(carry: _Carry) -> _Carry:
            """The steps up to the next evaluation, and that."""
            boundary = _next_boundary(carry.state.step, values)

            def is_inside(carry: _Carry) -> jax.Array:
                return (carry.state.step < boundary) & ~carry.stopped & ~carry.evaluate

            carry = lax.while_loop(is_inside, one_step, carry)
            if evaluation_infeed is None:
                return carry._replace(evaluate=jnp.zeros_like(carry.evaluate))
            return lax.cond(carry.stopped, lambda carry: carry, evaluate, carry)

        def one_step(carry: _Carry) -> _Carry:
            pulled = infeed.pull(carry.state.step, jnp.zeros((), jnp.int32))
            control = pulled.control
            # A stop comes in place of a batch: the step is not made, so the state is that of the steps emitted.
            state = lax.cond(control.stop, lambda state: state, lambda state: update(state, pulled), carry.state)
            return carry._replace(state=state, stopped=control.stop, evaluate=control.evaluate & ~control.stop)

        def update(state: TrainState, pulled: Pulled) -> TrainState:
            state, loss, learning_rate = train_step(model, state, pulled, values)
            outfeed.push_loss(state.step, loss, learning_rate)
            return state

        def evaluate(carry: _Carry) -> _Carry:
            assert evaluation_infeed is not None
            tally, stopped = evaluate_split(
                model, carry.state, evaluation_infeed, carry.num_evaluations * values.num_eval_batches, values
            )
            lax.cond(stopped, lambda: None, lambda: outfeed.push_evaluation(carry.state.step, tally))
            return _Carry(carry.state, stopped, jnp.zeros((), jnp.bool), carry.num_evaluations + 1)

        no = jnp.zeros((), jnp.bool)
        carry = lax.while_loop(goes_on, segment, _Carry(state, no, no, jnp.zeros((), jnp.int32)))
        return carry.state

    return train


def _next_boundary(step: jax.Array, values: RunValues) -> jax.Array:
    """The updates after which the next evaluation is due, int32 []."""
    every = values.eval_every_steps
    multiple = (step // jnp.maximum(every, 1) + 1) * every
    return jnp.where(every > 0, jnp.minimum(multiple, values.stop_step), values.stop_step)


def evaluate_split(
    model: TrainModel, state: TrainState, infeed: Infeed, first_pull: jax.Array, values: RunValues
) -> tuple[Tally, jax.Array]:
    """Counts a whole split with the running statistics.

    Args:
        model: what is evaluated.
        state: its parameters and statistics.
        infeed: of the split's batches.
        first_pull: int32 [], the address of the first.
        values: of the run.

    Returns:
        The tally, and whether the host asked for a stop, in which case the tally is not whole (bool []).
    """

    def goes_on(carry: tuple[jax.Array, jax.Array, Tally]) -> jax.Array:
        batch, stopped, _ = carry
        return (batch < values.num_eval_batches) & ~stopped

    def one_batch(carry: tuple[jax.Array, jax.Array, Tally]) -> tuple[jax.Array, jax.Array, Tally]:
        batch, _, tally = carry
        pulled = infeed.pull(first_pull + batch, jnp.zeros((), jnp.int32))
        images = unpack_pixels(pulled.pixels, values.scale)
        logits, _ = model.apply(state.params, state.batch_stats, images, train=False)
        return batch + 1, pulled.control.stop, tally_batch(tally, logits, pulled.labels)

    start = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.bool), empty_tally()
    _, stopped, tally = lax.while_loop(goes_on, one_batch, start)
    return tally, stopped


def train_step(
    model: TrainModel, state: TrainState, pulled: Pulled, values: RunValues
) -> tuple[TrainState, jax.Array, jax.Array]:
    """Makes one update: unpack, forward, backward, optimiser.

    Returns:
        The new state, the batch's mean loss (float32 []) and the learning rate of the update (float32 []).
    """
    images = unpack_pixels(pulled.pixels, values.scale)
    learning_rate = values.hyperparams.learning_rate * pulled.control.learning_rate_factor

    def loss_of(params: Any) -> tuple[jax.Array, Any]:
        logits, batch_stats = model.apply(params, state.batch_stats, images, train=True)
        return cross_entropy(logits, pulled.labels), batch_stats

    (loss, batch_stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    optimizer = sgd(values.hyperparams._replace(learning_rate=learning_rate))
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, batch_stats, opt_state), loss, learning_rate
