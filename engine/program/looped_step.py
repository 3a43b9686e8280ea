"""A training step traced twice over: as a flat list of operations, and as a loop of one iteration made of these."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopfeed.engine.crossing.infeed import Batch
from loopfeed.engine.program.flat_program import FlatProgram, flatten_program
from loopfeed.engine.program.loop import train_step
from loopfeed.engine.program.train_state import TrainModel, TrainState
from loopfeed.engine.scopes import TRAIN
from loopfeed.engine.updates.settings import CompiledSettings, RuntimeSettings
from loopfeed.engine.updates.update import Outcome

_SAMPLE_SIZE = 1 << 16


class StepProgram:
    """One training step of a run on one device.

    Args:
        model, settings: of the run.
        state, batch, learning_rate_factor, values: what the step is made with.

    Attributes:
        flat: its operations.
        arguments: the arrays that these take.
        num_state: how many of the arguments, and of the results, are the training state.
    """

    def __init__(
        self,
        model: TrainModel,
        settings: CompiledSettings,
        state: TrainState,
        batch: Batch,
        learning_rate_factor: jax.Array,
        values: RuntimeSettings,
    ) -> None:
        @jax.named_scope(TRAIN)
        def step(state: TrainState, *others: Any) -> tuple[TrainState, Outcome]:
            state, outcome, _, _ = train_step(model, settings, state, *others)
            return state, outcome

        given = state, batch, learning_rate_factor, values
        traced, results = jax.make_jaxpr(step, return_shape=True)(*given)
        self._results = jax.tree.structure(results)
        self.flat: FlatProgram = flatten_program(traced)
        self.arguments: list[Any] = jax.tree.leaves(given)
        self.num_state = len(jax.tree.leaves(state))
        self.watched = self.flat.boundaries()

    def name_results(self, results: Sequence[Any]) -> tuple[TrainState, Outcome]:
        """Return the new state and the outcome of the step, given the results of its operations."""
        named: tuple[TrainState, Outcome] = jax.tree.unflatten(self._results, results)
        return named

    def looped(self, num_steps: jax.Array, *arguments: Any) -> tuple[list[Any], dict[int, Any]]:
        """Make the step in a loop, traced into a program.

        Args:
            num_steps: int32 [], 1; a runtime value, so that the loop stays a loop.
            arguments: those of the operations.

        Returns:
            The results of the operations, and a sample of each value that leaves its scope.
        """
        constant = list(arguments[self.num_state :])

        def body(carry: tuple[jax.Array, list[Any], dict[int, Any]]) -> tuple[jax.Array, list[Any], dict[int, Any]]:
            number, results, _ = carry
            found: dict[int, Any] = {}

            def watch(value: int, array: Any) -> None:
                if value in self.watched:
                    found[value] = sample_of(array)

            results = self.flat.run([*results[: self.num_state], *constant], watch)
            return number + 1, results, found

        none = jnp.zeros((), jnp.int32)
        shapes = jax.eval_shape(body, (none, list(arguments), {}))
        _, others, samples = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        start = none, [*arguments[: self.num_state], *others[self.num_state :]], samples
        _, results, found = lax.while_loop(lambda carry: carry[0] < num_steps, body, start)
        return results, found


def sample_of(array: Any) -> Any:
    """Return an array itself, or, if it is large, some of its numbers, evenly spaced: at most 65,536.

    The distance shares no factor with the size, so that the sample has numbers of every channel.
    """
    stride = -(-array.size // _SAMPLE_SIZE)
    if stride <= 1:
        return array
    while math.gcd(stride, array.size) > 1:
        stride += 1
    return array.reshape(-1)[::stride]
