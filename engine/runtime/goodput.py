"""Goodput: what the wall time of all launches of a run was spent on, what was compiled, and what a rollback lost.

The name is that of "ML productivity goodput" (Google Cloud, 2024): steps that are made again were no progress.
"""

import json
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.monitoring

from loopfeed.engine.records.limits import LONGEST_LINE_BYTES
from loopfeed.engine.runtime.record import Compilations, Goodput, LaunchRuntime, RunGoodput
from loopfeed.engine.spans import Spans
from loopfeed.preprocess.regular_file import open_regular, read_at

_OF_THE_LOOP = ("steps", "evaluation", "snapshots", "waiting")
_PARTS = (*_OF_THE_LOOP, "compilation", "other")
# The longest time from the last update of the record to a kill, but for a disk that hangs: the rest is a clock that was
# set forward.
_MOST_EXTRA_S = 60.0
# Launches whose details are kept.
_NUM_DETAILED = 10


def add_up(launches: Sequence[LaunchRuntime]) -> RunGoodput:
    """Return the goodput over launches, oldest first: what was lost is taken from the parts of the loop alike."""
    sums = {name: sum(getattr(each.goodput, name) for each in launches) for name in _PARTS}
    in_loop = sum(sums[name] for name in _OF_THE_LOOP)
    lost = min(in_loop, sum(each.lost_s for each in launches))
    kept = {name: sums[name] * (1 - lost / in_loop) if in_loop else 0.0 for name in _OF_THE_LOOP}
    return RunGoodput(
        **(sums | kept),
        lost=lost,
        lost_steps=sum(each.lost_steps for each in launches),
        gaps=sum(max(0.0, after.started - before.ended) for before, after in pairwise(launches)),
    )


def without_details(launches: Sequence[LaunchRuntime]) -> tuple[LaunchRuntime, ...]:
    """Return launches, of which only the newest keep their longest lists: a run may have thousands of launches."""
    blank = LaunchRuntime(0, 0, 0, 0, "done", {}, "")
    slim = [replace(each, ring=blank.ring, stalls=(), slow_operations=()) for each in launches[:-_NUM_DETAILED]]
    return (*slim, *launches[-_NUM_DETAILED:])


@dataclass(frozen=True)
class Rollback:
    """What a resume takes back.

    Attributes:
        launches: the earlier launches, with a killed one ending at its last line.
        num_steps: steps that are made again.
        seconds: the time that they took.
    """

    launches: tuple[LaunchRuntime, ...] = ()
    num_steps: int = 0
    seconds: float = 0.0


def find_rollback(launches: Sequence[LaunchRuntime], loss_log: Path, start_step: int, start_bytes: int) -> Rollback:
    """Return what a resume takes back, according to the lines of the loss log that it will cut off.

    Args:
        launches: the earlier launches, at least one.
        loss_log: the log, not cut yet.
        start_step: the step from which the run is resumed.
        start_bytes: the size of the log up to that step.

    Raises:
        OSError: the log cannot be read.
    """
    end = _last_line(loss_log, None)
    if end is None:
        return Rollback(tuple(launches))
    end_step, ended = end
    *earlier, last = launches
    if last.state == "running" and ended > last.ended:
        # It was killed after its last update.
        extra = min(_MOST_EXTRA_S, ended - last.ended)
        goodput = replace(last.goodput, steps=last.goodput.steps + extra)
        last = replace(last, ended=last.ended + extra, end_step=max(end_step, last.end_step), goodput=goodput)
    known = (*earlier, last)
    if ended <= last.started and last.end_step == last.start_step:
        # It was killed before it cut off the lines that it counted as lost.
        end_step = min(end_step, last.start_step)
    if end_step <= start_step:
        return Rollback(known)
    begin = _last_line(loss_log, start_bytes)
    since = known[0].started if begin is None else begin[1]
    # A launch rewrote all lines after its beginning: what earlier ones took for these was counted as lost by then.
    first = max((number for number, each in enumerate(known) if each.start_step <= start_step), default=0)
    num_steps, makers = end_step - start_step, known[first:]
    if ended < since:
        # The clock was set back meanwhile: every step counts alike.
        num_made = max(1, num_steps, sum(each.end_step - each.start_step for each in makers))
        seconds = sum(_loop_seconds(each, 0.0, math.inf) for each in makers) * num_steps / num_made
    else:
        seconds = sum(_loop_seconds(each, since, ended) for each in makers)
    return Rollback(known, num_steps, seconds)


def _loop_seconds(launch: LaunchRuntime, since: float, until: float) -> float:
    """Return how many seconds of a launch's loop lie between two times."""
    of_loop = launch.ended - sum(getattr(launch.goodput, name) for name in _OF_THE_LOOP)
    return max(0.0, min(until, launch.ended) - max(since, of_loop))


def _last_line(log: Path, size: int | None) -> tuple[int, float] | None:
    """Return step and time of the last whole line in the first `size` bytes of a log, or in all; None without one."""
    with suppress(FileNotFoundError), os.fdopen(open_regular(log), "rb", buffering=0) as file:
        stop = os.fstat(file.fileno()).st_size if size is None else size
        begin = max(0, stop - LONGEST_LINE_BYTES)
        lines = read_at(file.fileno(), stop - begin, begin).rpartition(b"\n")[0].split(b"\n")
        with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            values = json.loads(lines[-1])
            return int(values["step"]), float(values["time"])
    return None


def parts_of(*, total: float, **parts: float) -> Goodput:
    """Return the goodput of a launch, whose remaining time is "other"."""
    return Goodput(**parts, other=max(0.0, total - sum(parts.values())))


_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_COMPILE = "/jax/core/compile/backend_compile_duration"
_HIT, _MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


@contextmanager
def recording_compilations(spans: Spans) -> Iterator[None]:
    """Record them inside the context, under jax's names; jax calls this only when it traces or compiles."""
    guard = threading.Lock()

    def add(event: str, duration_secs: float, **_: Any) -> None:
        if event in (_TRACE, _COMPILE, _HIT, _MISS):
            with guard:
                spans[event].add(duration_secs)

    def count(event: str, **_: Any) -> None:
        add(event, 0.0)

    jax.monitoring.register_event_listener(count)
    jax.monitoring.register_event_duration_secs_listener(add)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_listener(count)
        jax.monitoring.unregister_event_duration_listener(add)


def compilations_of(spans: Spans) -> Compilations:
    """Return the counts so far."""
    trace, compiled = spans[_TRACE], spans[_COMPILE]
    hits, misses = spans[_HIT].count, spans[_MISS].count
    return Compilations(trace.count, trace.total_s, compiled.count, compiled.total_s, hits, misses)
