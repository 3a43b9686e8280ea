"""Counts what jax traces and compiles in this process during a launch."""

import threading
from typing import Any

import jax.monitoring

from loopfeed.engine.runtime.record import Compilations

_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_COMPILE = "/jax/core/compile/backend_compile_duration"
_HIT, _MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


class CompilationCounter:
    """A context manager that counts; jax calls it only when it traces or compiles."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys((_TRACE, _COMPILE, _HIT, _MISS), 0)
        self._seconds = dict.fromkeys((_TRACE, _COMPILE), 0.0)
        self._guard = threading.Lock()

    def __enter__(self) -> "CompilationCounter":
        jax.monitoring.register_event_listener(self._count)
        jax.monitoring.register_event_duration_secs_listener(self._add)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._count)
        jax.monitoring.unregister_event_duration_listener(self._add)

    def counts(self) -> Compilations:
        """Return the counts so far."""
        with self._guard:
            return Compilations(
                num_traces=self._counts[_TRACE],
                trace_s=self._seconds[_TRACE],
                num_programs=self._counts[_COMPILE],
                compile_s=self._seconds[_COMPILE],
                cache_hits=self._counts[_HIT],
                cache_misses=self._counts[_MISS],
            )

    def _count(self, event: str, **_: Any) -> None:
        if event in (_HIT, _MISS):
            with self._guard:
                self._counts[event] += 1

    def _add(self, event: str, duration_secs: float, **_: Any) -> None:
        if event in self._seconds:
            with self._guard:
                self._counts[event] += 1
                self._seconds[event] += duration_secs
