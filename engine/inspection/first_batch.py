"""The batch that a run would train on first: pulled through its own infeed, by a program of its own.

Trains nothing and writes nothing. A run that was used for this cannot train any more.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from loopfeed.engine.compilation.ahead_of_time import compile_traced, trace_ahead
from loopfeed.engine.control.signals import call_on_worker
from loopfeed.engine.crossing.choice import traced_platform
from loopfeed.engine.crossing.infeed import Batch
from loopfeed.engine.program.one_batch import OneBatch, pull_one_batch
from loopfeed.engine.replicas import device_put_replicated, replicate, unreplicate
from loopfeed.engine.run.run import Run
from loopfeed.engine.updates.settings import RuntimeSettings

type LookAt = Callable[[OneBatch, jax.Array, RuntimeSettings], Any]
"""(a device's part of a batch, its number int32 [], runtime settings) → what to return; called while tracing."""


def look_at_first_batch(run: Run, look: LookAt) -> Any:
    """Pull the batch that comes next, call `look` with it inside a program on the devices, and return its result.

    Args:
        run: a run that is open and has not been executed.
        look: returns arrays that are equal on all devices.

    Raises:
        BaseException: the error of the batch source.
        KeyboardInterrupt: a signal came first.
    """
    config, infeed, transport, devices = run.config, run.infeed, run.transport, run.team.devices
    replicas, source, form = run.settings.replicas, run.data.source, run.settings.objective.label_form
    rows = config.batch // replicas.count
    label_shape = (rows,) if form is None else (rows, form.num_words)
    shapes = jax.eval_shape(
        lambda: Batch(jnp.zeros((rows, source.height, source.width), jnp.uint32), jnp.zeros(label_shape, jnp.int32))
    )

    def program(batch_index: jax.Array, values: RuntimeSettings) -> tuple[Any, jax.Array]:
        one = pull_one_batch(infeed, replicas, shapes, batch_index)
        return look(one, batch_index, values), one.is_there

    run.board.prepare(
        first_batch=run.start.batch_index,
        batches_per_step=config.accumulate_steps,
        replayed=run.start.events,
        record=lambda _: None,
    )
    arguments = jnp.int32(run.start.batch_index), run.values()
    traced = trace_ahead(replicate(program, devices), *arguments, platform=traced_platform(devices[0]))
    compiled = compile_traced(traced, deterministic=config.deterministic, keeps=transport)
    with transport.running(), ExitStack() as stack:
        stack.callback(infeed.close)
        infeed.start()
        placed = device_put_replicated(arguments, devices)
        result = call_on_worker(partial(_call, compiled.call, placed))
        found, is_there = unreplicate(result, devices)
    failure = infeed.failure or transport.failure
    if failure is not None:
        raise failure
    if not is_there:
        raise KeyboardInterrupt(f"stopped by {run.board.stop_reason}; nothing was written")
    return found


def _call(compiled: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return jax.block_until_ready(compiled(*arguments))
