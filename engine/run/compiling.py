"""Compilation of the program of an open run: traced, compiled while its first state is made, or only looked at."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopfeed.engine.compilation.ahead_of_time import (
    Compiled,
    Traced,
    caching_compilations,
    compile_traced,
    memory_warning,
    trace_ahead,
)
from loopfeed.engine.compilation.garbage_collector import without_collector
from loopfeed.engine.control.signals import call_on_worker, start_on_worker
from loopfeed.engine.crossing.choice import this_device, traced_platform
from loopfeed.engine.objective.batch_size_check import check_batch_size
from loopfeed.engine.program.checked_model import CheckedModel
from loopfeed.engine.program.kernels import slow_convolutions_warning
from loopfeed.engine.program.loop import make_program
from loopfeed.engine.program.train_state import TrainState
from loopfeed.engine.replicas import replicate, shapes_on
from loopfeed.engine.run.program_settings import seed_words
from loopfeed.engine.run.resume import find_cuts
from loopfeed.engine.run.run import Run
from loopfeed.engine.run.starting_weights import put_given_weights
from loopfeed.engine.runtime.record import ProgramTimes
from loopfeed.engine.spans import COMPILING
from loopfeed.preprocess.quantities import duration_text

# jax's name for NVIDIA GPUs, the only devices for which a program is compiled where there are none.
_ABSENT_BACKEND = "gpu"
# A large network takes minutes. It is said after this, then after twice as long each time.
_SAID_AFTER_S = 30.0


class DryRun(NamedTuple):
    """The compiled program of a run that is not started.

    Attributes:
        run: the run, which is closed.
        compiled: the program, with XLA's analysis of memory and work.
        traced: the program before XLA optimised it.
        in_all_forms: the jaxpr of the program with layers in their forms for all platforms, if it was asked for.
    """

    run: Run
    compiled: Compiled
    traced: Traced
    in_all_forms: Any = None


def plan_program(run: Run, *, is_explained: bool = False) -> DryRun:
    """Compile the program without creating its initial state.

    Args:
        is_explained: whether the program is to be read: a program in the cache must then have the same scopes and
            source lines, and the program is traced once more with layers in their forms for all platforms, one of
            which says what they compute.
    """
    if run.start.recorded is not None and run.path is not None:
        find_cuts(run.path, run.start)
    with caching_compilations(run.config.compilation_cache, run.notify, by_metadata=is_explained):
        traced = trace_program(run)
        compiled = compile_program(run, traced)
    if not is_explained:
        return DryRun(run, compiled, traced)
    program, arguments = _whole_program(run, run.checked_model())
    return DryRun(run, compiled, traced, jax.make_jaxpr(program)(*arguments))


@contextmanager
def compiling(run: Run, cache: str | None, *, by_metadata: bool = False) -> Iterator[None]:
    """Keep compiled programs in a cache inside the block, and Python's collector away until the first loss.

    The collector would also delay the compiler, which needs the interpreter lock. Its first collection after the
    trace takes tenths of a second, so it waits until the first loss has come.
    """
    with caching_compilations(cache, run.notify, by_metadata=by_metadata):
        run.spans[COMPILING].begin()
        run.paused_collector.enter_context(without_collector())
        yield
        run.spans[COMPILING].end()


def trace_program(run: Run) -> Traced:
    """Trace the program on this thread, whose jax settings then apply, and warn about its convolutions."""
    run.notify("compiling the training program, or loading it from the cache")
    is_here, model = run.place.is_here, run.checked_model(run.notify)
    program, arguments = _whole_program(run, model)
    platform = traced_platform(run.team.devices[0]) if is_here else run.place.platform
    traced = trace_ahead(program, *arguments, donate=(0,), platform=platform)
    if is_here:
        is_evaluated = run.evaluation_infeed is not None
        objective = run.settings.evaluated_objective if is_evaluated else run.settings.objective
        check_batch_size(objective, model.outputs, run.notify)
    if run.registry_name is None and (warning := slow_convolutions_warning(traced.jaxpr)):
        run.notify(warning)
    return traced


def prepare(run: Run, traced: Traced) -> tuple[Compiled, TrainState]:
    """Compile the program and create its initial state at the same time, and return both."""
    finish = _start_compiling(run, traced)
    try:
        state = starting_state(run)
    except Exception:
        # Wait for the compilation, during which jax's settings must not change, but raise the first error.
        with suppress(Exception):
            finish()
        raise
    return finish(), state


def compile_program(run: Run, traced: Traced) -> Compiled:
    """Compile the program without creating its initial state."""
    return _start_compiling(run, traced)()


def _whole_program(run: Run, model: CheckedModel) -> tuple[Callable[..., Any], Any]:
    """Return the training program on all devices, and the shapes of its arguments."""
    program = make_program(model, run.settings, run.stages, run.infeed, run.outfeed, run.evaluation_infeed)
    arguments: Any = (run.state_shape, run.values())
    devices = run.team.devices
    return replicate(program, devices), arguments if run.place.is_here else shapes_on(arguments, devices)


def _start_compiling(run: Run, traced: Traced) -> Callable[[], Compiled]:
    """Compile a traced program on a worker thread, and return a function that waits for it."""
    worker = start_on_worker(
        partial(
            compile_traced,
            traced,
            deterministic=run.config.deterministic,
            dump_folder=None if run.config.dump_hlo is None else Path(run.config.dump_hlo),
            keeps=run.transport,
            backend=None if run.place.is_here else _ABSENT_BACKEND,
            is_profiled=run.config.profile,
        )
    )

    def finish() -> Compiled:
        began, limit_s = time.monotonic(), _SAID_AFTER_S
        while not worker.wait(limit_s):
            run.notify(f"still compiling, after {duration_text(time.monotonic() - began)}")
            limit_s *= 2
        compiled = worker.result()
        _note_program(run, "training", compiled)
        origin = "loaded from the cache, " if compiled.from_cache else ""
        run.notify(
            f"compiled training program in {compiled.compile_s:.1f} s ({origin}traced in {compiled.trace_s:.1f} s)"
        )
        return compiled

    return finish


def starting_state(run: Run) -> TrainState:
    """Return the initial state: the state in the snapshot that the launch starts from, if any, else a new state."""
    if run.start.snapshot is not None:
        from loopfeed.engine.records.snapshot import match_state

        saved = match_state(run.start.snapshot.leaves, run.state_shape)
        if run.evaluation_infeed is None:
            # Without an infeed, the loop would wait for ever for the evaluation that is due.
            saved = saved._replace(owes_evaluation=np.zeros((), np.bool))
        # Release the host's copy of the arrays, which needs as much memory again.
        run.start = replace(run.start, snapshot=None)
        return call_on_worker(lambda: jax.block_until_ready(jax.tree.map(partial(jnp.array, copy=True), saved)))
    words = seed_words(run.config.seed)
    draw = compile_traced(trace_ahead(run.draw, words, platform=traced_platform(this_device())))
    _note_program(run, "initial state", draw)
    return call_on_worker(lambda: jax.block_until_ready(put_given_weights(run.given, draw.call(words), run.settings)))


def _note_program(run: Run, name: str, compiled: Compiled) -> None:
    run.programs.append(ProgramTimes(name, compiled.trace_s, compiled.compile_s, compiled.from_cache))


def warn_of_memory(run: Run, compiled: Compiled) -> None:
    """Warn if the program needs more memory than the machine has, because the system would kill it silently."""
    if (warning := memory_warning(compiled, run.ring_bytes)) is not None:
        run.notify(warning)
