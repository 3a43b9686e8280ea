"""The hardware and software on which the figures were measured."""

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from loopfeed.preprocess.control_groups import host_memory_bytes, num_cores

_PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "tensorstore", "pillow", "optax", "torch"),
    "onednn-cpu-gomp",
)
_VARIABLES = (
    *("JAX_", "XLA_", "OMP_", "KMP_", "GOMP_", "MKL_", "DNNL_", "ONEDNN_", "TORCH", "MALLOC_", "GLIBC_TUNABLES"),
    *("LD_PRELOAD", "LOOPFEED_"),
)
# Extensions of x86-64 that decide how fast products are, as Linux names them.
_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")


def describe_hardware() -> dict[str, Any]:
    """Return the machine as JSON: CPU, cores of this process, memory in bytes, load, operating system, cards."""
    return {
        "cpu": _cpu_info("model name") or platform.processor() or platform.machine(),
        "instruction_sets": instruction_sets(),
        "cores": num_cores(),
        "memory_bytes": host_memory_bytes(),
        "load_average": load_average(),
        "system": platform.platform(),
        "cards": describe_cards(),
    }


def describe_cards() -> list[str]:
    """Return the NVIDIA cards, each with its driver and memory, as nvidia-smi reports them."""
    output = _ask("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader") or ""
    return [line.strip() for line in output.splitlines() if line.strip()]


def describe_environment() -> dict[str, str]:
    """Return the environment variables that configure Loopfeed, jax, XLA, PyTorch, oneDNN, OpenMP and the allocator."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that Loopfeed's speed depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def instruction_sets() -> list[str]:
    """Return which of the extensions that matter here the processor has; an empty list if the system does not tell."""
    flags = _cpu_info("flags").split()
    return [name for name in _INSTRUCTION_SETS if name in flags]


def _cpu_info(key: str) -> str:
    """Return what Linux says of the first core; empty if the system does not tell."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(rf"^{key}\s*:\s*(.+)$", told, re.MULTILINE)
    return found[1].strip() if found else ""


def load_average() -> list[float] | None:
    """Return the average numbers of running threads in the last 1, 5 and 15 minutes; None if the system has none."""
    return [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None


def short_commit(commit: str | None) -> str:
    """Return the abbreviated commit, with its "+" if files were changed."""
    return "unknown" if commit is None else commit[:12] + "+" * commit.endswith("+")


def git_commit(root: Path) -> str | None:
    """Return the commit checked out at `root`, with "+" if files differ from it; None if there is none."""
    commit = _ask("git", "-C", str(root), "rev-parse", "HEAD")
    changes = _ask("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return None if commit is None or changes is None else commit + "+" * bool(changes)


def _ask(*command: str) -> str | None:
    """Return what a command prints; None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
