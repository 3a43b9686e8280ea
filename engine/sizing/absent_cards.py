"""NVIDIA GPUs that are not here: as devices of jax for which XLA compiles a run's program, but which cannot run it.

For a process of its own, in which jax computes on the CPU: jax looks for a GPU at import if its CUDA plugin is there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental import topologies

from loopfeed.engine.crossing.cuda.driver import CudaDriver
from loopfeed.engine.crossing.cuda.transport import CudaTransport
from loopfeed.engine.crossing.devices import Team
from loopfeed.engine.run.host_side import Placement
from loopfeed.engine.sizing.cards import Card


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
    return Placement(Team(devices, devices[:devices_per_host]), absent_transport())


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
