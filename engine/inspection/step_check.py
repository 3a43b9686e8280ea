"""One training step, made in a compiled loop, operation by operation and by the run's program, and how these differ.

The step is traced twice over: as a flat list of operations, and as a loop of one iteration made of these.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from loopfeed.engine.compilation.ahead_of_time import compile_traced, trace_ahead
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.signals import call_on_worker
from loopfeed.engine.crossing.infeed import Batch
from loopfeed.engine.inspection.differences import Difference, compare, effect, join, largest_effect
from loopfeed.engine.inspection.show_batch import look_at_first_batch, names_of_first_batch
from loopfeed.engine.keys import is_key
from loopfeed.engine.parts import PartArguments, UserParts, take_parts
from loopfeed.engine.program.flat_program import FlatProgram, flatten_program
from loopfeed.engine.program.random_rounding import RandomRounding, switches
from loopfeed.engine.program.train_state import TrainModel, TrainState
from loopfeed.engine.program.train_step import train_step
from loopfeed.engine.run.compiling import compiling, prepare, starting_state, trace_program
from loopfeed.engine.run.run import Run
from loopfeed.engine.run.train import set_up_run
from loopfeed.engine.scopes import BACKWARD, LOSS, OPT_STEP, TRAIN
from loopfeed.engine.settings import SettingError
from loopfeed.engine.updates.settings import Cadence, CompiledSettings, RuntimeSettings
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


_DISTURBED_RUNS = 2
_LOSS_GRADIENT = f"{BACKWARD}/{LOSS}"
_PASSED_ON = 2.0  # times what rounding did to the gradient of the loss


@dataclass(frozen=True)
class StepCheck:
    """How a training step differs between the compiled program and the same operations run one by one.

    Attributes:
        step: the step that was made, from 1.
        num_operations: number of operations.
        scopes: for each scope, in order, how the values that leave it differ in a loop compiled from the same
            operations.
        results: likewise for the results of that loop: "loss", "weights", "batch statistics", "optimizer".
        program: likewise for the results of the run's own program; empty if one step of it takes several batches.
        unstable: the parts of the step, scopes and results, that rounding alone moves too far even if no ReLU and no
            choice between two numbers switches, and how far, relative to their norm.
        names: the name of each image of the batch in the pack (`ShardSplit.names`); None if the images have no names.
    """

    step: int
    num_operations: int
    scopes: Mapping[str, Difference]
    results: Mapping[str, Difference]
    program: Mapping[str, Difference]
    unstable: Mapping[str, float] = MappingProxyType({})
    names: tuple[str, ...] | None = None

    @property
    def is_right(self) -> bool:
        """Whether rounding explains every difference, and moves no part of the step too far."""
        return self.is_explained and not self.unstable

    @property
    def is_explained(self) -> bool:
        """Whether rounding explains every difference."""
        parts = (self.scopes, self.results, self.program)
        return all(each.is_explained for part in parts for each in part.values())

    @property
    def first_unexplained(self) -> str | None:
        """The first scope with a difference that rounding does not explain, None if there is none."""
        return next((name for name, each in self.scopes.items() if not each.is_explained), None)


def check_step(
    config: TrainConfig,
    *,
    notify: Callable[[str], None] = lambda _: None,
    **parts: Unpack[PartArguments],
) -> StepCheck:
    """Make the step that `train` would make next in the compiled program and operation by operation, and compare them.

    The arguments and errors are those of `train`. A batch source must return the same batch whenever it is asked for
    it. Nothing is written.
    """
    return check_step_of(config, take_parts(parts), notify)


def check_step_of(config: TrainConfig, parts: UserParts, notify: Callable[[str], None]) -> StepCheck:
    """Check the next step of a run; see `check_step`."""
    config = replace(config, profile=False)
    with set_up_run(config, parts, notify, is_dry=True) as run:
        if len(run.team.devices) > 1:
            raise SettingError("devices", "a step is checked on one device, got {setting} {found}: give 1",
                               found=len(run.team.devices))  # fmt: skip
        program, names = _step_program(run), names_of_first_batch(run)
        notify(f"running {len(program.flat.operations):,} operations one by one, {1 + _DISTURBED_RUNS} times")
        held = dict.fromkeys(switches(program.flat))
        reference = _run_singly(program, held=held)
        disturbed = [_run_singly(program, RandomRounding(seed)) for seed in range(1, 1 + _DISTURBED_RUNS)]
        limit = _most_moved(program)
        unstable = _moved(reference, disturbed, limit)
        if unstable:
            notify(
                "rounding moves a part by more than allowed: running the operations once more, with every switch held"
            )
            # The least that rounding does, because what sets the allowance is more than it does in most sums.
            unstable = _moved(reference, [_run_singly(program, RandomRounding(1, held, widens_sums=False))], limit)
        notify("compiling a loop of the same operations")
        looped = _run_looped(program, deterministic=config.deterministic)
        step = run.start.step + 1
    whole: Mapping[str, Difference] = {}
    results = [each.results for each in disturbed]
    if config.accumulate_steps == 1:
        with set_up_run(config, parts, lambda _: None, is_dry=True) as run:
            notify("compiling the training program")
            whole = _compare(reference.results, _run_whole(run, step), results)
    return StepCheck(
        step=step,
        num_operations=len(program.flat.operations),
        scopes=_compare(reference.scopes, looped.scopes, [each.scopes for each in disturbed]),
        results=_compare(reference.results, looped.results, results),
        program=whole,
        unstable=unstable,
        names=names,
    )


def _step_program(run: Run) -> StepProgram:
    """Return the next step of a run, with the batch that it would take."""
    batch, factor = look_at_first_batch(run, lambda one, *_: (one.batch, one.learning_rate_factor))
    state = starting_state(run)
    values = run.values().in_stage(run.stage_number)
    return StepProgram(run.checked_model(), run.stage.settings, state, Batch(*batch), factor, values)


type _Parts = dict[str, list[Any]]
"""Samples of the values of each part of a step, by its name."""


class _Seen(NamedTuple):
    """What one way to make the step gives: the values that leave each scope, and its results."""

    scopes: _Parts
    results: _Parts


def _run_singly(
    program: StepProgram, change: Any = lambda _, values: values, held: dict[int, Any] | None = None
) -> _Seen:
    """Run the operations one by one; keep the results of those in `held`, by the numbers of their values."""
    samples: dict[int, Any] = {}

    def watch(value: int, array: Any) -> None:
        if value in program.watched:
            samples[value] = np.asarray(sample_of(array))
        if held is not None and value in held:
            held[value] = array

    results = call_on_worker(partial(program.flat.run, program.arguments, watch, change))
    return _name_seen(program, samples, results)


def _run_looped(program: StepProgram, *, deterministic: bool) -> _Seen:
    arguments = jnp.int32(1), *program.arguments
    compiled = compile_traced(trace_ahead(program.looped, *arguments, platform=None), deterministic=deterministic)
    results, samples = call_on_worker(lambda: jax.block_until_ready(compiled.call(*arguments)))
    return _name_seen(program, samples, results)


def _name_seen(program: StepProgram, samples: Mapping[int, Any], results: list[Any]) -> _Seen:
    scopes: _Parts = {}
    for value, scope in program.watched.items():
        scopes.setdefault("/".join(filter(None, (scope.action, scope.path))), []).append(np.asarray(samples[value]))
    state, outcome = program.name_results(results)
    return _Seen(scopes, _results_of(state, outcome.loss))


def _results_of(state: TrainState, loss: Any) -> _Parts:
    named = {
        "loss": loss,
        "weights": state.params,
        "batch statistics": state.batch_stats,
        "optimizer": state.update,
    }
    leaves = {name: [leaf for leaf in jax.tree.leaves(tree) if not is_key(leaf)] for name, tree in named.items()}
    return {name: [np.asarray(sample_of(leaf)) for leaf in found] for name, found in leaves.items() if found}


def _run_whole(run: Run, step: int) -> _Parts:
    """Make one step by the program of the run, without evaluation and snapshot."""
    with compiling(run, run.config.compilation_cache):
        compiled, state = prepare(run, trace_program(run))
    none = jnp.int32(0)
    values = run.values()._replace(
        stop_step=jnp.int32(step), evaluations=Cadence(none), num_eval_batches=none, snapshots=Cadence(none)
    )
    run.board.prepare(
        first_batch=run.start.batch_index, batches_per_step=1, replayed=run.start.events, record=lambda _: None
    )
    state = run.execute(compiled, state, [], values)
    if int(state.step) != step:
        failure = run.failure(state)
        raise KeyboardInterrupt(f"stopped by {run.board.stop_reason}") if failure is None else failure
    return _results_of(state, run.stream.losses[-1])


def _compare(reference: _Parts, found: _Parts, disturbed: list[_Parts]) -> dict[str, Difference]:
    """Compare each part of a step."""
    return {
        name: join([
            compare(value, found[name][number], [each[name][number] for each in disturbed])
            for number, value in enumerate(values)
        ])
        for name, values in reference.items()
    }  # fmt: skip


def _most_moved(program: StepProgram) -> float:
    """Return how far rounding alone may move a part of the step, relative to its norm."""
    dtypes = {value.aval.dtype for each in program.flat.operations for value in each.equation.outvars}
    return largest_effect(dtype for dtype in dtypes if not jnp.issubdtype(dtype, jax.dtypes.extended))


def _moved(reference: _Seen, disturbed: list[_Seen], limit: float) -> dict[str, float]:
    """Return the parts that one of the disturbed runs moves by more than `limit`, and how far the first does.

    The gradient of an image that is already classified with certainty is a small difference of numbers near 1, which
    rounding moves far. What follows from it may move twice as far as it.
    """
    found: dict[str, float] = {}
    for each in reversed(disturbed):
        sizes = {name: effect(one, each.scopes[name]) for name, one in reference.scopes.items()}
        passed_on = max(limit, _PASSED_ON * min(sizes.get(_LOSS_GRADIENT, 0.0), limit))
        found |= {name: size for name, size in sizes.items()
                  if size > (passed_on if name.startswith((f"{BACKWARD}/", OPT_STEP)) else limit)}  # fmt: skip
        # A scope may have the name of a result, such as "loss".
        results = {name: effect(one, each.results[name]) for name, one in reference.results.items()}
        found |= {name: size for name, size in results.items() if size > passed_on}
    return found
