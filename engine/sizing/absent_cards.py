"""NVIDIA GPUs that are not here: XLA's compiler for them, and devices for which it compiles, but which cannot run.

The devices are for a process of its own, in which jax computes on the CPU: jax looks for a GPU at import if its CUDA
plugin is there.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from loopfeed.engine.crossing.cuda.driver import CudaDriver
from loopfeed.engine.crossing.cuda.transport import CudaTransport
from loopfeed.engine.crossing.devices import Placement, Team
from loopfeed.engine.sizing.cards import Card
from loopfeed.engine.sizing.plan import Analysed

COMPILER_FOLDER = "card-compiler"
"""The folder of the compiler in a Python environment, if it is not one of the environment's packages."""
PLUGINS = ("xla_cuda13", "xla_cuda12")
"""The names of jax's CUDA plugins."""
TIME_LIMIT_S = 1800.0
_PACKAGES = ("jax-cuda13-pjrt", "jax-cuda13-plugin")


def absent_cards(card: Card, num_devices: int, devices_per_host: int) -> list[jax.Device]:
    """Return devices for which programs can be compiled; XLA's compiler for NVIDIA GPUs must be on the path.

    Args:
        card: the kind of the GPUs.
        num_devices: their number.
        devices_per_host: how many of them each host has, if there are several hosts.
    """
    num_hosts = -(-num_devices // devices_per_host)
    per_host = min(num_devices, devices_per_host)
    found = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=card.description, topology=f"1x{num_hosts}x{per_host}"
    )
    return list(found.devices)[:num_devices]


def card_placement(devices: list[jax.Device], devices_per_host: int) -> Placement:
    """Return where a run on these devices is placed; the first host drives its own devices."""
    return Placement(Team(devices, devices[:devices_per_host]), absent_transport(), "cuda", is_here=False)


@contextmanager
def compiling_without_cards() -> Iterator[None]:
    """Have jax compile without the host callbacks of a program, which XLA refuses if there is no GPU."""
    from jax._src import compiler

    compile_whole = compiler.backend_compile_and_load

    def without_callbacks(backend: Any, module: Any, devices: Any, options: Any, _callbacks: Any) -> Any:
        return compile_whole(backend, module, devices, options, ())

    compiler.backend_compile_and_load = without_callbacks
    try:
        yield
    finally:
        compiler.backend_compile_and_load = compile_whole


class _StandIn:
    """What stands for a GPU until a program is compiled for it."""

    def __init__(self, card: Card) -> None:
        self.device_kind = card.name


def stand_ins(card: Card, num_devices: int) -> list[Any]:
    """Return objects that stand for GPUs in a run that is opened, but not compiled; they need no compiler."""
    return [_StandIn(card) for _ in range(num_devices)]


def absent_transport() -> CudaTransport:
    """Return a cuda transport for programs that are only compiled, on a machine without an NVIDIA GPU or its driver."""
    return CudaTransport(CudaDriver(functions=_do_nothing))


def _do_nothing(_name: str) -> Callable[..., int]:
    return lambda *_: 0


class CardCompilerError(RuntimeError):
    """Failure to compile a program for GPUs that are not here; the message is one line."""


def find_card_compiler() -> Path | None:
    """Return the folder of packages that contains the compiler, None if it is not installed."""
    folders = [Path(sys.prefix) / COMPILER_FOLDER, *map(Path, filter(None, sys.path))]
    return next((each for each in folders if any((each / "jax_plugins" / name).is_dir() for name in PLUGINS)), None)


def installation_hint() -> str:
    """Return how to install the compiler on this machine."""
    if sys.platform != "linux":
        return "it exists only for Linux: plan on a Linux machine"
    packages = " ".join(f"{each}=={version('jaxlib')}" for each in _PACKAGES)
    return (
        "pip install '.[cuda]', or only the compiler: "
        f"pip install --no-deps --target {Path(sys.prefix) / COMPILER_FOLDER} {packages}"
    )


def compile_for_cards(request: Mapping[str, Any], program: str, *, time_limit_s: float = TIME_LIMIT_S) -> Analysed:
    """Compile a run's program for GPUs that are not here, in a process of its own, and return XLA's analysis.

    Args:
        request: what to compile, as JSON: `settings` of the run, names of the user's own `parts` by option, `card`, the
            kind of GPU, `num_devices` and `devices_per_host`.
        program: a Python program that answers a request (`answer_request`), given the names of two files.
        time_limit_s: the longest time that this may take.

    Raises:
        CardCompilerError: the compiler is missing or failed, or took too long.
        ValueError: the settings cannot be trained on these devices.
    """
    folder = find_card_compiler()
    if folder is None:
        raise CardCompilerError(
            f"XLA's compiler for NVIDIA GPUs is not installed; it needs no GPU: {installation_hint()}"
        )
    with tempfile.TemporaryDirectory(prefix="loopfeed-") as place:
        asked, answered = Path(place) / "request.json", Path(place) / "answer.json"
        asked.write_text(json.dumps({**request, "compiler": str(folder)}), encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, "-c", program, str(asked), str(answered)],
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=time_limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CardCompilerError(
                f"XLA did not compile the program within {time_limit_s:g} s: try a smaller model"
            ) from None
        if not answered.exists():
            raise CardCompilerError(f"XLA's compiler for NVIDIA GPUs failed: {_last_line(done)}")
        answer = json.loads(answered.read_text(encoding="utf-8"))
    if "refused" in answer:
        raise ValueError(answer["refused"])
    return Analysed(**answer)


def _last_line(done: "subprocess.CompletedProcess[str]") -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"it ended with code {done.returncode}"
