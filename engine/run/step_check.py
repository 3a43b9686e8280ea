"""One training step, made in a compiled loop, operation by operation and by the run's program, and how these differ."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.crossing.infeed import Batch
from loopfeed.engine.feed.batches import BatchFunction, BatchSource, EvaluationArrays, EvaluationSource
from loopfeed.engine.images.own_augment import OwnAugmentation
from loopfeed.engine.objective.losses import Loss
from loopfeed.engine.objective.metrics import Metric, PerExample
from loopfeed.engine.program.flat_program import Operation
from loopfeed.engine.program.looped_step import StepProgram, sample_of
from loopfeed.engine.program.random_rounding import RandomRounding, switches
from loopfeed.engine.program.train_state import TrainModel, TrainState
from loopfeed.engine.run.compilation import caching_compilations, compile_traced, trace_ahead
from loopfeed.engine.run.differences import Difference, compare, effect, join, largest_effect
from loopfeed.engine.run.first_batch import look_at_first_batch
from loopfeed.engine.run.launch import Launch
from loopfeed.engine.run.open_run import open_run
from loopfeed.engine.run.parts import OwnParts
from loopfeed.engine.run.signals import call_on_worker
from loopfeed.engine.scopes import Scope
from loopfeed.engine.settings import SettingError
from loopfeed.engine.updates.own_optimizer import OwnOptimizer
from loopfeed.engine.updates.update import Schedule

_DISTURBED_RUNS = 2


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
    """

    step: int
    num_operations: int
    scopes: Mapping[str, Difference]
    results: Mapping[str, Difference]
    program: Mapping[str, Difference]
    unstable: Mapping[str, float] = MappingProxyType({})

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
    model: TrainModel | None = None,
    batches: BatchFunction | BatchSource | None = None,
    evaluation: EvaluationSource | EvaluationArrays | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric | PerExample] | None = None,
    optimizer: OwnOptimizer | None = None,
    schedule: Schedule | None = None,
    augment: OwnAugmentation | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> StepCheck:
    """Make the step that `train` would make next in the compiled program and operation by operation, and compare them.

    The arguments and errors are those of `train`. A batch source must return the same batch whenever it is asked for
    it. Nothing is written.
    """
    parts = OwnParts(model, batches, evaluation, loss, metrics, optimizer, schedule, augment)
    return check_step_of(config, parts, notify)


def check_step_of(config: TrainConfig, parts: OwnParts, notify: Callable[[str], None]) -> StepCheck:
    """Check the next step of a run; see `check_step`."""
    config = replace(config, profile=False)
    with open_run(config, parts, notify, is_dry=True) as run:
        launch = run.launch
        if len(launch.team.devices) > 1:
            raise SettingError("devices", "a step is checked on one device, got {setting} {found}: give 1",
                               found=len(launch.team.devices))  # fmt: skip
        program = _step_program(launch)
        notify(f"running {len(program.flat.operations):,} operations one by one, {1 + _DISTURBED_RUNS} times")
        held = _Switches(switches(program.flat))
        observed = [_Observed.of(program, held)]
        observed += [_Observed.of(program, RandomRounding(seed)) for seed in range(1, 1 + _DISTURBED_RUNS)]
        unstable = _find_unstable(program, observed, held, notify)
        notify("compiling a loop of the same operations")
        looped = _run_looped(program, deterministic=config.deterministic)
        step = launch.start.step + 1
    whole = None
    if config.accumulate_steps == 1:
        with open_run(config, parts, lambda _: None, is_dry=True) as run:
            notify("compiling the training program")
            whole = _run_whole(run.launch, step)
    scopes: dict[str, list[Difference]] = {}
    for value, scope in program.watched.items():
        samples = [each.samples[value] for each in (observed[0], looped, *observed[1:])]
        scopes.setdefault(_name_of(scope), []).append(compare(samples[0], samples[1], samples[2:]))
    return StepCheck(
        step=step,
        num_operations=len(program.flat.operations),
        scopes={name: join(found) for name, found in scopes.items()},
        results=_compare_results(observed, looped.results),
        program={} if whole is None else _compare_results(observed, whole),
        unstable=unstable,
    )


def _name_of(scope: Scope) -> str:
    return "/".join(filter(None, (scope.action, scope.path)))


class _Switches:
    """Keeps the results of switches of the first run, without changing anything."""

    def __init__(self, numbers: frozenset[int]) -> None:
        self._numbers = numbers
        self.found: dict[int, Any] = {}

    def __call__(self, operation: Operation, outputs: list[Any]) -> list[Any]:
        self.found |= {number: each for number, each in zip(operation.outputs, outputs, strict=True)
                       if number in self._numbers}  # fmt: skip
        return outputs


def _find_unstable(
    program: StepProgram, observed: "list[_Observed]", held: _Switches, notify: Callable[[str], None]
) -> dict[str, float]:
    """Return the parts that random rounding moves too far, even with every switch held and each sum rounded once.

    The least that rounding does, because what sets the allowance for differences is more than it does in most sums.
    """
    dtypes = {value.aval.dtype for each in program.flat.operations for value in each.equation.outvars}
    limit = largest_effect(dtype for dtype in dtypes if not jnp.issubdtype(dtype, jax.dtypes.extended))
    reference = observed[0].parts(program)

    def moved(disturbed: "_Observed") -> dict[str, float]:
        found = {name: effect(reference[name], part) for name, part in disturbed.parts(program).items()}
        return {name: size for name, size in found.items() if size > limit}

    if not any(map(moved, observed[1:])):
        return {}
    notify("rounding moves a part by more than allowed: running the operations once more, with every switch held")
    return moved(_Observed.of(program, RandomRounding(1, held.found, widens_sums=False)))


def _step_program(launch: Launch) -> StepProgram:
    """Return the next step of a launch, with the batch that it would take."""
    parts = launch.inside
    batch, factor = look_at_first_batch(launch, lambda one, *_: (one.batch, one.learning_rate_factor))
    state = launch.starting_state()
    return StepProgram(parts.model, parts.statics, state, Batch(*batch), factor, parts.values)


type Results = dict[str, list[Any]]
"""Samples of the results of a step, by what they are."""


@dataclass(frozen=True)
class _Observed:
    """What was seen of one way to make the step: samples of the values that leave a scope, and of its results."""

    samples: Mapping[int, Any]
    results: Results

    @classmethod
    def of(cls, program: StepProgram, change: Any = lambda _, values: values) -> "_Observed":
        """Run the operations one by one."""
        samples: dict[int, Any] = {}

        def watch(value: int, array: Any) -> None:
            if value in program.watched:
                samples[value] = np.asarray(sample_of(array))

        results = call_on_worker(partial(program.flat.run, program.arguments, watch, change))
        state, outcome = program.name_results(results)
        return cls(samples, _results_of(state, outcome.loss))

    def parts(self, program: StepProgram) -> dict[str, list[Any]]:
        """Return what was seen of each scope, and of each result, by its name."""
        found: dict[str, list[Any]] = {}
        for value, scope in program.watched.items():
            found.setdefault(_name_of(scope), []).append(self.samples[value])
        return found | self.results


def _results_of(state: TrainState, loss: Any) -> Results:
    named = {
        "loss": loss,
        "weights": state.params,
        "batch statistics": state.batch_stats,
        "optimizer": state.update,
    }
    leaves = {name: [leaf for leaf in jax.tree.leaves(tree) if _is_number(leaf)] for name, tree in named.items()}
    return {name: [np.asarray(sample_of(leaf)) for leaf in found] for name, found in leaves.items() if found}


def _is_number(leaf: Any) -> bool:
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _run_looped(program: StepProgram, *, deterministic: bool) -> _Observed:
    arguments = jnp.int32(1), *program.arguments
    compiled = compile_traced(trace_ahead(program.looped, *arguments, platform=None), deterministic=deterministic)
    results, samples = call_on_worker(lambda: jax.block_until_ready(compiled.call(*arguments)))
    state, outcome = program.name_results(results)
    return _Observed({value: np.asarray(each) for value, each in samples.items()}, _results_of(state, outcome.loss))


def _run_whole(launch: Launch, step: int) -> Results:
    """Make one step by the program of the run, without evaluation and snapshot."""
    with caching_compilations(launch.config.compilation_cache):
        compiled, state = launch.prepare()
    none = jnp.int32(0)
    values = launch.inside.values._replace(
        stop_step=jnp.int32(step), eval_every_steps=none, num_eval_batches=none, snapshot_every_steps=none
    )
    launch.board.prepare(
        first_pull=launch.start.pulls, pulls_per_step=1, replayed=launch.start.events, record=lambda _: None
    )
    state = launch.run(compiled, state, [], values)
    if int(state.step) != step:
        failure = launch.failure(state)
        raise KeyboardInterrupt(f"stopped by {launch.board.stop_reason}") if failure is None else failure
    return _results_of(state, launch.stream.losses[-1])


def _compare_results(observed: list[_Observed], found: Results) -> dict[str, Difference]:
    reference, *disturbed = (each.results for each in observed)
    return {
        name: join([
            compare(value, found[name][number], [each[name][number] for each in disturbed])
            for number, value in enumerate(values)
        ])
        for name, values in reference.items()
    }  # fmt: skip
