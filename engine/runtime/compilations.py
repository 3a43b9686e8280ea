"""Records what jax traces and compiles in this process during a launch."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax.monitoring

from loopfeed.engine.runtime.record import Compilations
from loopfeed.engine.spans import Spans

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
