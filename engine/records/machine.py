"""What of a machine the bits of a computation depend on, besides the kind and number of devices; and the versions.

On a processor: its model, by which LLVM chooses instructions; the instruction sets that XLA may use; and the number of
threads among which XLA divides its work. On other devices: the version of their platform. Everywhere: the flags of XLA.
Must not know: jax.
"""

import os
import platform as system
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from loopfeed.models.xla_threads import NUM_THREADS_VARIABLE, given_num_threads
from loopfeed.preprocess.cores import num_allowed_cores
from loopfeed.preprocess.quantities import listed

RECORDED_NAME = "feedloop"
"""The name under which records have Loopfeed's version: that of the package in the first runs."""

NOT_INSTALLED = "not installed"
"""The version of a package that is not installed, such as Loopfeed when it runs from its source tree."""

MACHINE = "machine"
"""The key of the description of a launch's machine in the resolved part of `config.json`."""
PROCESSOR, INSTRUCTIONS, THREADS = "processor", "instructions", "threads"
PLATFORM, FLAGS, OPTIONS = "platform", "xla_flags", "jax_options"
type ThreadRule = Literal["free", "settable", "fixed"]
"""How bits depend on the number of threads: not at all, on what `NUM_THREADS_VARIABLE` says, or on the cores, too."""
_WORDS = {
    PROCESSOR: "the processor",
    INSTRUCTIONS: "the instruction sets that XLA uses",
    THREADS: "the threads of XLA, one for each core",
    PLATFORM: "the platform of the devices",
    FLAGS: "XLA_FLAGS",
    OPTIONS: "jax's options",
}

# XLA's names for its limits, --xla_cpu_max_isa, each with the flags of Linux that show it; each includes those before.
_X86 = (
    ("SSE4_2", ("sse4_2",)),
    ("AVX", ("avx",)),
    ("AVX2", ("avx2", "fma")),
    ("AVX512", ("avx512f", "avx512bw", "avx512dq", "avx512vl")),
    ("AVX512_VNNI", ("avx512_vnni",)),
    ("AVX512_BF16", ("avx512_bf16",)),
    ("AMX", ("amx_tile", "amx_bf16")),
    ("AMX_FP16", ("amx_fp16",)),
)
_ARM = (("NEON", ("asimd",)), ("BF16", ("bf16",)), ("SVE", ("sve",)), ("SVE2", ("sve2",)), ("SME", ("sme",)))
_LIMIT = "--xla_cpu_max_isa"
# They change no number: time limits, what is dumped or profiled, and what is recorded by itself.
_WITHOUT_EFFECT = re.compile(
    rf"--({_LIMIT[2:]}|xla_force_host_platform_device_count|xla_dump\w*|xla_hlo_profile|xla_\w*timeout\w*)\b"
)
_CPU_INFO = Path("/proc/cpuinfo")
# Which processor it is, beside its name: of x86 and of ARM.
_NUMBERS = ("cpu family", "model", "stepping", "cpu implementer", "cpu part", "cpu variant")


def describe_machine(platform: str, platform_version: str, options: Mapping[str, object]) -> dict[str, str]:
    """Return what rounding depends on here, as recorded with each launch.

    Args:
        platform: that of the devices, such as "cpu".
        platform_version: what jax says of it.
        options: those of jax's own options that change numbers; only those that are set are recorded.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    everywhere = {
        FLAGS: " ".join(sorted(each for each in flags if not _WITHOUT_EFFECT.match(each))),
        OPTIONS: " ".join(f"{name}={value}" for name, value in sorted(options.items()) if value),
    }
    if platform != "cpu":
        return {PLATFORM: " ".join(platform_version.split())} | everywhere
    model, found = _read_processor()
    limit = next((each.partition("=")[2].upper() for each in reversed(flags) if each.startswith(f"{_LIMIT}=")), None)
    threads = str(given_num_threads() or num_allowed_cores())
    return {PROCESSOR: model, INSTRUCTIONS: _limited(found, limit), THREADS: threads} | everywhere


def machine_differences(
    before: Mapping[str, str] | None, now: Mapping[str, str], threads: ThreadRule = "fixed"
) -> list[str]:
    """Return each difference between the machines of two launches in words; none for what one does not record.

    Args:
        before, now: the machines, as `describe_machine` returns them.
        threads: how the bits depend on the number of threads.
    """
    found = []
    for name, words in _WORDS.items():
        if before is None or name not in before or name not in now or before[name] == now[name]:
            continue
        if name == THREADS and threads == "free":
            continue
        is_settable = name == THREADS and threads == "settable"
        remedy = f"; {NUM_THREADS_VARIABLE}={before[name]} in the environment makes as many" if is_settable else ""
        found.append(f"{words} ({before[name] or 'none'}, now {now[name] or 'none'}{remedy})")
    return found


def machine_warning(
    befores: Iterable[Mapping[str, str] | None], now: Mapping[str, str], threads: ThreadRule = "fixed"
) -> str | None:
    """Return a warning that a run goes on where it may round otherwise than in its launches before; None if not."""
    differences = list(dict.fromkeys(each for before in befores for each in machine_differences(before, now, threads)))
    if not differences:
        return None
    return (
        "warning: only the same machine guarantees bit-identical results; the run had others than it has now: "
        f"{listed(differences)}"
    )


def _limited(found: str, limit: str | None) -> str:
    """Return the newest instruction sets that XLA may use: those of the processor, or those of its limit if less."""
    order = [name for name, _ in _X86]
    if limit not in order or found not in order:
        return found if limit is None else f"{found}, at most {limit}"
    return min(found, limit, key=order.index)


def _read_processor() -> tuple[str, str]:
    """Return the model of the processor and the newest instruction sets that it has, as far as the system says."""
    fields: dict[str, str] = {}
    try:
        with _CPU_INFO.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                fields.setdefault(name.strip().lower(), value.strip())
    except OSError:
        pass
    numbers = [fields[name] for name in _NUMBERS if name in fields]
    model = " ".join([fields.get("model name") or system.processor() or system.machine(), *filter(None, numbers)])
    has = set((fields.get("flags") or fields.get("features") or "").split())
    sets = _X86 if "flags" in fields else _ARM
    found = [name for name, flags in sets if has.issuperset(flags)]
    return " ".join(model.split()), found[-1] if found else system.machine()


def version_of(package: str) -> str:
    """Return the version of a package, or `NOT_INSTALLED` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def versions_of(*others: str) -> dict[str, str]:
    """Return the versions of Loopfeed and of other packages, as records have them."""
    return {RECORDED_NAME: version_of("loopfeed")} | {name: version_of(name) for name in others}
