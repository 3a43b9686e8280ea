"""Ahead-of-time compilation: trace a program, compile it or load it from the disk cache, and report XLA's analysis."""

import os
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
from jax.experimental.compilation_cache import compilation_cache

from loopfeed.engine.compilation.cache_place import check_cache_place, local_folder
from loopfeed.engine.compilation.garbage_collector import without_collector
from loopfeed.engine.hlo.program import kernel_flops
from loopfeed.engine.records.whole_file import make_folder, write_whole
from loopfeed.models.kernels.onednn.team_library import cache_fault
from loopfeed.models.layers.platform_forms import tracing_for
from loopfeed.models.trusted_folder import (
    CACHE_REMEDY,
    file_fault,
    folder_fault,
    make_private_folder,
    user_cache_folder,
)
from loopfeed.preprocess.control_groups import host_memory_bytes

_PREFIX = "Error (reading|writing) persistent compilation cache entry for '(.*?)': (?:\\w+: )?(.*)"
# File systems round modification times, some of them to two seconds.
_ROUNDING_S = 2.0

_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"
# The names of the files of `jax._src.lru_cache`.
_CACHE_FILES = ("-cache", "-atime", ".lockfile")
_METADATA_IN_KEY = "jax_compilation_cache_include_metadata_in_key"
# jax's settings are global to the process, and so is their lock: two runs that compile at once take turns.
_SETTINGS_GUARD = threading.RLock()


@dataclass(frozen=True)
class Traced:
    """A program that has been traced and lowered but not yet compiled.

    Attributes:
        lowered: jax's lowered stage, in StableHLO.
        trace_s: seconds that tracing and lowering took.
        jaxpr: the traced program.
    """

    lowered: jax.stages.Lowered
    trace_s: float
    jaxpr: Any = None


@dataclass(frozen=True)
class Compiled:
    """A compiled program and its analysis.

    Attributes:
        call: runs the program.
        trace_s, compile_s: seconds to trace and lower it, and to compile or load it.
        from_cache: whether it was loaded from the cache on disk.
        memory_bytes: XLA's memory analysis by kind (arguments, results, temporaries, code, and what is reused: the
            arguments whose memory results take, which are counted as both), in bytes; empty if there is none.
        keeps: the object that the program calls; a thread that waits for `call` must keep this one alive, and so the
            object.
    """

    call: jax.stages.Compiled
    trace_s: float
    compile_s: float
    from_cache: bool
    memory_bytes: dict[str, int]
    keeps: object = None

    @property
    def step_flops(self) -> float | None:
        """The number of floating-point operations in one step as counted by XLA, or None if XLA reports no number.

        Those of a processor's own kernels, of which XLA knows nothing, are added.
        """
        # XLA counts the body of a loop without a known trip count once, so the program's count is that of one step.
        analysis = self.call.cost_analysis()
        if not analysis or "flops" not in analysis:
            return None
        return float(analysis["flops"]) + kernel_flops(self.call.as_text() or "")

    @property
    def peak_bytes(self) -> int:
        """The memory in bytes that one execution needs, as estimated by XLA; donated buffers are counted once."""
        sizes = self.memory_bytes
        parts = ("arguments", "results", "temporaries")
        return sum(sizes.get(part, 0) for part in parts) - sizes.get("reused", 0)


def trace_ahead(
    function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = (), platform: str | None
) -> Traced:
    """Trace and lower `function` once, on the calling thread, so that this thread's jax settings apply.

    Args:
        function: the function to compile.
        arguments: pytrees of arrays or jax.ShapeDtypeStruct.
        donate: positions of the arguments whose memory the program may reuse.
        platform: the only platform for which the forms of layers are traced, such as "cpu"; None traces those of all.
    """
    started = time.perf_counter()
    with without_collector(), tracing_for(platform):
        traced = jax.jit(function, donate_argnums=donate).trace(*arguments)
        lowered = traced.lower()
    return Traced(lowered, time.perf_counter() - started, traced.jaxpr)


def compile_traced(
    traced: Traced,
    *,
    deterministic: bool = True,
    dump_folder: Path | None = None,
    keeps: object = None,
    backend: str | None = None,
    is_profiled: bool = False,
) -> Compiled:
    """Compile a traced program, or load it from the cache on disk.

    Args:
        traced: the program.
        deterministic: whether to exclude operations whose results are not bit-identical from run to run.
        dump_folder: where to write `program.stablehlo.mlir` and `program.optimised.hlo`; None writes neither.
        keeps: see `Compiled`.
        backend: the jax backend of the devices for which it was traced; None is the default one.
        is_profiled: whether its operations will be traced while it runs.
    """
    started = time.perf_counter()
    with _counting_cache_hits() as hits:
        backend = backend or jax.default_backend()
        options = compiler_options(traced.lowered, backend, deterministic=deterministic)
        if is_profiled and backend == "gpu":
            # The operations that XLA launches together as one command buffer would have no names in a trace.
            options |= {"xla_gpu_enable_command_buffer": ""}
        compiled = traced.lowered.compile(compiler_options=options)
    compile_s = time.perf_counter() - started
    if dump_folder is not None:
        make_folder(dump_folder)
        write_whole(dump_folder / "program.stablehlo.mlir", traced.lowered.as_text().encode())
        write_whole(dump_folder / "program.optimised.hlo", (compiled.as_text() or "").encode())
    return Compiled(compiled, traced.trace_s, compile_s, bool(hits), _memory_bytes(compiled), keeps)


def memory_warning(compiled: Compiled, beside_bytes: int) -> str | None:
    """Return a warning if a program and so many bytes beside it need more memory than this machine has."""
    if jax.default_backend() != "cpu":
        return None
    needed, available = compiled.peak_bytes + beside_bytes, host_memory_bytes()
    if available is None or needed <= available:
        return None
    return (
        f"warning: the program needs about {needed / 1e9:,.1f} GB, but this machine has {available / 1e9:,.1f} GB: use "
        "a smaller --batch"
    )


def compiler_options(lowered: jax.stages.Lowered, backend: str, *, deterministic: bool) -> dict[str, str | bool | int]:
    """Return the XLA options that make results on a jax backend correct and, if `deterministic`, reproducible.

    On CPU, jaxlib 0.11.2 and 0.12.0 fuse convolutions, norms and the mean that follows them into one YNNPACK
    computation, which in bfloat16 returned NaN (`resnet8` in evaluation at 32 px). Fusing only single products or
    single convolutions is correct.

    On GPU, a deterministic program excludes nondeterministic operations; XLA rejects an operation without a
    deterministic alternative. It then times no kernels, which could choose another one each time, but takes the
    first that the library proposes. `xla_gpu_autotune_level` must stay above 0: at 0, XLA names no kernel at all, and
    cuDNN runs its convolutions on one that is thousands of times slower (H100, jaxlib 0.11.2). Matrix products are
    left to cuBLAS: none of XLA's own kernels for them is certain to work untimed (jaxlib 0.11.2).
    """
    if backend == "gpu" and deterministic:
        return {
            "xla_gpu_exclude_nondeterministic_ops": True,
            "xla_gpu_enable_triton_gemm": False,
        }
    if backend != "cpu" or "bf16" not in lowered.as_text():
        return {}
    kinds = ("LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT", "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION")
    return {"xla_cpu_experimental_ynn_fusion_type": ",".join(kinds)}


@contextmanager
def caching_compilations(
    folder: str | None, notify: Callable[[str], None] = lambda _: None, *, by_metadata: bool = False
) -> Iterator[None]:
    """Cache compiled programs on disk inside the block, and restore jax's settings afterwards.

    Use it only around compilations: whatever else the process compiles meanwhile is cached too.

    Args:
        folder: the cache folder; None uses the one set by the caller or $JAX_COMPILATION_CACHE_DIR, or otherwise the
            user's cache folder; "off" caches nothing.
        notify: called with a warning if the folder cannot be written, or can be written by other users, in which cases
            nothing is cached, or an entry cannot be written or read.
        by_metadata: whether a program in the cache must also have the scopes and source lines of the one to compile.
            By default jax takes any program with the same instructions, whose scopes may be those of older code.

    Raises:
        SettingError: as `check_cache_place`.
    """
    check_cache_place("compilation_cache", folder or jax.config.jax_compilation_cache_dir)
    with _SETTINGS_GUARD:
        if folder is None:
            folder = jax.config.jax_compilation_cache_dir or _default_folder(notify)
        folder = local_folder(folder)
        if folder != "off" and (fault := _cache_fault(folder)) is not None:
            notify(fault)
            folder = "off"
        elif (fault := cache_fault()) is not None:
            notify(f"warning: the library of kernels in the cache is not used, but built for this process: {fault}")
        settings = {
            "jax_compilation_cache_dir": None if folder == "off" else folder,
            # By default jax does not cache programs that compile in under a second, which take most of the time
            # that a small model needs to start.
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            _METADATA_IN_KEY: by_metadata or getattr(jax.config, _METADATA_IN_KEY),
        }
        before = {name: getattr(jax.config, name) for name in settings}
        _configure(settings)
        try:
            with reporting_cache_faults(folder, notify):
                yield
        finally:
            _configure(before)


def _default_folder(notify: Callable[[str], None]) -> str:
    """Return the folder for programs in the user's cache folder; "off", with a warning, if there is none."""
    if (cache := user_cache_folder()) is not None:
        return os.fspath(cache / "xla")
    notify(
        "warning: this user has no cache folder that can be written, so every launch compiles its program again: "
        f"{CACHE_REMEDY}, or give one with --compilation-cache"
    )
    return "off"


def _cache_fault(folder: str) -> str | None:
    """Return a warning if nothing is to be cached in a folder, which is created if missing; None if it can be used.

    jax itself warns of a folder that cannot be written only at each program, in several lines, and runs whatever
    programs it finds.
    """
    if "://" in folder:
        return None
    try:
        if (fault := folder_fault(Path(folder)) or _first_file_fault(Path(folder))) is not None:
            return (
                f"warning: the compilation cache {folder} is not used, because the programs in it would be run, but "
                f"{fault}, or give another folder, or off, with --compilation-cache"
            )
        make_private_folder(Path(folder))
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return (
            f"warning: the compilation cache {folder} cannot be written ({error.strerror or type(error).__name__}), so "
            "every launch compiles its program again: give a writable folder, or off, with --compilation-cache"
        )


def _first_file_fault(folder: Path) -> str | None:
    """Return what is wrong with a file of a cache that jax would read or write; None if nothing is."""
    if not folder.is_dir():
        return None
    status = folder.stat()
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process has removed it
            if path.name.endswith(_CACHE_FILES) and (fault := file_fault(path, status)) is not None:
                return fault
    return None


def _configure(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # jax opens the cache once per process; without this, a later folder would be ignored.
    compilation_cache.reset_cache()


@contextmanager
def _counting_cache_hits() -> Iterator[list[str]]:
    """Collect the cache hits that jax reports on this thread inside the block."""
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


@contextmanager
def reporting_cache_faults(folder: str, notify: Callable[[str], None]) -> Iterator[None]:
    """Replace jax's warnings about entries of the compilation cache by one notice at the first of them.

    jax warns once per program, in two lines. It leaves a part of an entry that it cannot write, and never replaces an
    entry that it cannot read, so each later launch would warn and compile again: both are removed here, for a program
    that cannot be read with all of its entries, because jax does not say which one it was.

    Args:
        folder: the cache folder, local or a URL.
        notify: called with the notice.
    """
    started, seen = time.time() - _ROUNDING_S, [False]
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message="Error (reading|writing) persistent compilation cache")
        show = warnings.showwarning

        def on_warning(message: Warning | str, *where: Any, **more: Any) -> None:
            found = re.match(_PREFIX, str(message), re.DOTALL)
            if found is None:
                show(message, *where, **more)
                return
            is_damaged = found[1] == "reading" and "[Errno" not in found[3]
            if found[1] == "writing" or is_damaged:
                _remove_newer(folder, found[2], 0.0 if is_damaged else started)
            if not seen[0]:
                seen[0] = True
                notify(_notice(folder, *found.groups()))

        warnings.showwarning = on_warning
        yield


def _notice(folder: str, action: str, program: str, reason: str) -> str:
    reason = " ".join(re.sub(r"^\[Errno \d+\] ", "", reason).split())
    if action == "writing":
        return (
            f"warning: the compilation cache {folder} cannot be written ({reason}), so the next launch compiles again: "
            "make room there, or give another folder with --compilation-cache"
        )
    return (
        f"warning: the compilation cache {folder} has entries that cannot be read, such as {program}-* ({reason}), "
        "which are compiled again, and replaced if they are damaged"
    )


def _remove_newer(folder: str, program: str, since: float) -> None:
    """Remove the entries of a program that were written after a time, in seconds since the epoch."""
    if "://" in folder:
        return
    for path in Path(folder).glob(f"{program}-*-cache"):
        with suppress(OSError):
            if path.stat().st_mtime >= since:
                path.unlink()
