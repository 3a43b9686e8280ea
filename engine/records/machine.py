"""The devices, processes and machine of a launch: what its bits depend on, and what a replay can promise.

On a processor: its model, by which LLVM chooses instructions; the instruction sets that XLA may use; and the number of
threads among which XLA divides its work. On other devices: the version of their platform. Everywhere: the flags of XLA.
Must not know: jax.
"""

import os
import platform as system
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from loopfeed.engine.config import TrainConfig
from loopfeed.models.xla_threads import NUM_THREADS_VARIABLE, given_num_threads
from loopfeed.preprocess.control_groups import num_allowed_cores, num_cores
from loopfeed.preprocess.quantities import listed
from loopfeed.preprocess.shown_values import shown

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


@cache
def version_of(package: str) -> str:
    """Return the version of a package, or `NOT_INSTALLED` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def versions_of(*others: str) -> dict[str, str]:
    """Return the versions of Loopfeed and of other packages, as records have them."""
    return {RECORDED_NAME: version_of("loopfeed")} | {name: version_of(name) for name in others}


@dataclass(frozen=True)
class Topology:
    """The devices and processes of a launch.

    Attributes:
        device: the vendor's name of the devices, such as "cpu".
        num_devices: their number, over all processes.
        num_processes: number of processes.
    """

    device: str
    num_devices: int = 1
    num_processes: int = 1

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Topology":
        """Return the topology that a record contains; the oldest records, of one device, contain no numbers.

        Raises:
            ValueError: if no run records it.
        """
        device, *numbers = values.get("device"), values.get("num_devices", 1), values.get("num_processes", 1)
        if not isinstance(device, str) or not all(type(each) is int and each >= 1 for each in numbers):
            found = str(shown([device, *numbers]))[:80]
            raise ValueError(
                f"a launch must have a device, as text, and numbers of devices and processes, but has {found}"
            )
        return Topology(device, *numbers)

    def to_json(self) -> dict[str, Any]:
        """Return the topology as a JSON object."""
        return {"device": self.device, "num_devices": self.num_devices, "num_processes": self.num_processes}

    def __str__(self) -> str:
        devices = "one device" if self.num_devices == 1 else f"{self.num_devices} devices"
        processes = f" in {self.num_processes} processes" if self.num_processes > 1 else ""
        return f"{devices} ({self.device}){processes}"


def in_one_process(config: TrainConfig, topology: Topology) -> TrainConfig:
    """Return a launch's settings with all of its devices, those of the other processes included, in this process."""
    if topology.num_processes == 1:
        return config
    count = topology.num_devices
    return replace(config, devices=f"cpu:{count}" if topology.device == "cpu" else str(count))


def describe_promise(
    recorded: Topology, device: str, num_parts: int = 0, differences: Sequence[str] | None = ()
) -> str:
    """Return which agreement to expect of a replay in one process, on as many devices as the record.

    Args:
        recorded: where the record was made.
        device: the vendor's name of the devices of the replay.
        num_parts: number of devices into which the processor of the replay is divided; 0 for other devices.
        differences: what else rounding depends on and is other here than in the record; None if the record lacks it.
    """
    if recorded.device != device:
        return (
            f"recorded on {recorded}, replayed on {device}: another kind of device rounds differently, so the losses "
            "agree only approximately"
        )
    # The sum of two numbers does not depend on their order.
    if recorded.num_processes > 1 and recorded.num_devices > 2:
        return (
            f"recorded on {recorded}, replayed in one process: sums over the devices may be added in another order, so "
            "the losses may differ by rounding"
        )
    # XLA has a thread for each core, or for each device if these are more, and divides its work among the threads.
    if num_parts > max(recorded.num_devices // recorded.num_processes, num_cores()):
        return (
            f"recorded on {recorded}, replayed in a process with {num_parts}, more than cores, which divides the work "
            "of a device in another way: the losses may differ by rounding. Replay these steps alone (--from, --to)"
        )
    where = f"recorded and replayed on {recorded}"
    if recorded.num_processes > 1:
        where = f"recorded on {recorded}, replayed on as many in one process"
    if differences:
        return f"{where}, but not alike: the losses may differ by rounding, because of {listed(differences)}"
    condition = "" if differences is not None else " on the same processor and cores, which the record lacks"
    return f"{where}: the same bits are expected{condition}"
