"""The training program: the project's only `while_loop`.

Owns the loop's carry and what one step is. Reads batches through the infeed, emits losses through the outfeed, and
knows nothing of files, threads or terminals.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax

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
        hyperparams: of the optimiser.
        scale: of the pixels.
    """

    stop_step: jax.Array
    hyperparams: Hyperparams
    scale: PixelScale


def init_state(model: TrainModel, key: jax.Array) -> TrainState:
    """Draws the state before the first step."""
    params, batch_stats = model.init(key)
    # The numbers do not matter here: only the state's shape comes from them.
    optimizer = sgd(Hyperparams(*(jnp.zeros((), jnp.float32) for _ in Hyperparams._fields)))
    return TrainState(jnp.zeros((), jnp.int32), params, batch_stats, optimizer.init(params))


def make_program(model: TrainModel, infeed: Infeed, outfeed: Outfeed) -> Callable[[TrainState, RunValues], TrainState]:
    """Builds the whole-training function, to be compiled once: (state, values) → the state after the last step."""

    def train(state: TrainState, values: RunValues) -> TrainState:
        def goes_on(carry: tuple[TrainState, jax.Array]) -> jax.Array:
            state, stopped = carry
            return (state.step < values.stop_step) & ~stopped

        def one_step(carry: tuple[TrainState, jax.Array]) -> tuple[TrainState, jax.Array]:
            state, _ = carry
            pulled = infeed.pull(state.step, jnp.zeros((), jnp.int32))
            # A stop comes in place of a batch: the step is not made, so the state is that of the steps emitted.
            state = lax.cond(pulled.control.stop, lambda state: state, lambda state: update(state, pulled), state)
            return state, pulled.control.stop

        def update(state: TrainState, pulled: Pulled) -> TrainState:
            state, loss, learning_rate = train_step(model, state, pulled, values)
            outfeed.push_loss(state.step, loss, learning_rate)
            return state

        state, _ = lax.while_loop(goes_on, one_step, (state, jnp.zeros((), jnp.bool)))
        return state

    return train


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
