"""What the figures were measured on and with."""

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from preprocess.cores import num_cores
from preprocess.memory import host_memory_bytes

_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "tensorstore", "pillow", "optax", "torch")


def describe_hardware() -> dict[str, Any]:
    """Gives the machine as JSON: CPU, cores of this process, memory in bytes, load, operating system."""
    return {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "memory_bytes": host_memory_bytes(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "cards": describe_cards(),
    }


def describe_cards() -> list[str]:
    """Gives NVIDIA's cards, each with its driver and memory, as their own tool tells them; none where there is none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in told.splitlines() if line.strip()]


def describe_environment() -> dict[str, str]:
    """Gives the variables that jax, XLA, OpenMP and the allocator are set by."""
    prefixes = ("JAX_", "XLA_", "OMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def describe_versions() -> dict[str, str]:
    """Gives the versions of Python and of what Feedloop's speed depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def cpu_model() -> str:
    """Gives the processor's name as the system tells it."""
    try:
        told = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if told:
            return told[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def short_commit(commit: str | None) -> str:
    """Gives what tells a commit among others, and the "+" of a changed one."""
    return "unknown" if commit is None else commit[:12] + "+" * commit.endswith("+")


def git_commit(root: Path) -> str | None:
    """Gives the commit that is checked out at `root`, with "+" where files differ from it; None where there is none."""

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        commit = ask("rev-parse", "HEAD")
        return commit + ("+" if ask("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
