"""Ahead-of-time compilation: trace, compile or load from the cache on disk, and say what XLA knows of the program."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
from jax.experimental.compilation_cache import compilation_cache

from engine.locations import user_cache_folder
from engine.records.whole_file import write_whole

_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"
# jax's settings belong to the process, and so does their guard: two runs that compile at once take turns.
_SETTINGS_GUARD = threading.RLock()


@dataclass(frozen=True)
class Traced:
    """A program traced and lowered, not yet compiled.

    Attributes:
        lowered: jax's stage, in StableHLO.
        trace_s: seconds that it took.
    """

    lowered: jax.stages.Lowered
    trace_s: float


@dataclass(frozen=True)
class Compiled:
    """A compiled program and what is known of it.

    Attributes:
        call: runs it.
        trace_s, compile_s: seconds that tracing and lowering took, and compiling or loading.
        from_cache: whether it was loaded from the cache on disk.
        memory_bytes: XLA's account by kind (arguments, results, temporaries, code), in bytes; empty where it has none.
        keeps: what the program calls, which lives as long as this: a thread that waits for `call` must hold this.
    """

    call: jax.stages.Compiled
    trace_s: float
    compile_s: float
    from_cache: bool
    memory_bytes: dict[str, int]
    keeps: object = None

    @property
    def step_flops(self) -> float | None:
        """Floating-point operations of one step by XLA's count, None where it has none."""
        # XLA counts the body of a loop without a known trip count once, so the program's count is that of one step.
        analysis = self.call.cost_analysis()
        return None if not analysis or "flops" not in analysis else float(analysis["flops"])

    @property
    def peak_bytes(self) -> int:
        """Memory of one run by XLA's account: arguments, results and temporaries, reused ones counted once."""
        account = self.memory_bytes
        parts = ("arguments", "results", "temporaries")
        return sum(account.get(part, 0) for part in parts) - account.get("reused", 0)


def trace_ahead(function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()) -> Traced:
    """Traces `function` once, on the calling thread, whose jax settings it so obeys.

    Args:
        function: what is to be compiled.
        arguments: pytrees of arrays or jax.ShapeDtypeStruct.
        donate: the arguments whose memory the program may reuse.
    """
    started = time.perf_counter()
    with without_collector():
        lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
    return Traced(lowered, time.perf_counter() - started)


def compile_traced(
    traced: Traced, *, deterministic: bool = True, dump_folder: Path | None = None, keeps: object = None
) -> Compiled:
    """Compiles a traced program, or loads it from the cache on disk.

    Args:
        traced: what to compile.
        deterministic: whether operations are left out that may give other bits each time.
        dump_folder: where to write `program.stablehlo.mlir` and `program.optimised.hlo`; None writes neither.
        keeps: see `Compiled`.
    """
    started = time.perf_counter()
    with _counting_cache_hits() as hits:
        options = compiler_options(traced.lowered, jax.default_backend(), deterministic=deterministic)
        compiled = traced.lowered.compile(compiler_options=options)
    compile_s = time.perf_counter() - started
    if dump_folder is not None:
        dump_folder.mkdir(parents=True, exist_ok=True)
        write_whole(dump_folder / "program.stablehlo.mlir", traced.lowered.as_text().encode())
        write_whole(dump_folder / "program.optimised.hlo", (compiled.as_text() or "").encode())
    return Compiled(compiled, traced.trace_s, compile_s, bool(hits), _memory_bytes(compiled), keeps)


@contextmanager
def without_collector() -> Iterator[None]:
    """Has Python's cyclic collector wait: tracing makes hundreds of thousands of objects that live on.

    To look through them again and again took a fourth of the time.
    """
    collects = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if collects:
            gc.enable()


def compiler_options(lowered: jax.stages.Lowered, backend: str, *, deterministic: bool) -> dict[str, str | bool | int]:
    """Gives the settings of XLA that a program needs to be right on a backend, by jax's name of it.

    On a CPU jaxlib 0.11.2 and 0.12.0 join convolutions, norms and the mean behind them to one computation of YNNPACK,
    which in bfloat16 came out as NaN (`resnet8` in evaluation at 32 px). Products and convolutions alone are right.

    A deterministic program for a GPU has no operation that is not; XLA refuses one that knows no other way. Of the
    others it tries none to find the fastest, which would be another one each time, but takes the libraries' first
    choice. Products are left to cuBLAS: of XLA's own kernels for them none is sure to do untried (jaxlib 0.11.2).
    """
    if backend == "gpu" and deterministic:
        return {
            "xla_gpu_exclude_nondeterministic_ops": True,
            "xla_gpu_autotune_level": 0,
            "xla_gpu_enable_triton_gemm": False,
        }
    if backend != "cpu" or "bf16" not in lowered.as_text():
        return {}
    kinds = ("LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT", "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION")
    return {"xla_cpu_experimental_ynn_fusion_type": ",".join(kinds)}


@contextmanager
def caching_compilations(folder: str | None) -> Iterator[None]:
    """Keeps compiled programs on disk inside the block, and puts jax's settings back after it.

    Meant for compiling alone: whatever else the process compiles meanwhile is kept too.

    Args:
        folder: where; None leaves a cache that the caller or $JAX_COMPILATION_CACHE_DIR has set, else takes the
            user's cache folder; "off" keeps none.
    """
    with _SETTINGS_GUARD:
        if folder is None:
            folder = jax.config.jax_compilation_cache_dir or os.fspath(user_cache_folder() / "xla")
        settings = {
            "jax_compilation_cache_dir": None if folder == "off" else folder,
            # By default jax leaves out what compiles in under a second, which is most of a small model's start.
            "jax_persistent_cache_min_compile_time_secs": 0.0,
        }
        before = {name: getattr(jax.config, name) for name in settings}
        _configure(settings)
        try:
            yield
        finally:
            _configure(before)


def _configure(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # The cache is opened once a process; without this a later folder would be ignored.
    compilation_cache.reset_cache()


@contextmanager
def _counting_cache_hits() -> Iterator[list[str]]:
    """Collects jax's events of programs found in the cache, on this thread and while the block runs."""
    hits: list[str] = []
    here = threading.get_ident()

    def listen(event: str, **_: Any) -> None:
        if event == _CACHE_HIT_EVENT and threading.get_ident() == here:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)


def _memory_bytes(compiled: jax.stages.Compiled) -> dict[str, int]:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    return {
        "arguments": analysis.argument_size_in_bytes,
        "results": analysis.output_size_in_bytes,
        "reused": analysis.alias_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "code": analysis.generated_code_size_in_bytes,
    }
