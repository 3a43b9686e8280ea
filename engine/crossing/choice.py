"""Which form the crossings take on this machine: how the host is called, how the program gets its batches.

Owns the choice alone; the forms are `engine.crossing.transport`, `engine.crossing.infeed` and, for NVIDIA,
`engine.crossing.cuda`.
"""

import math
import os
from collections.abc import Callable

import jax

from engine.config import TrainConfig, TransportName
from engine.control.board import ControlBoard
from engine.crossing.infeed import BatchInfeed, Infeed, WordsOf
from engine.crossing.transport import CallbackTransport, InplaceTransport, Transport
from engine.feed.feeder import Allocate, Feeder

type MakeFeeder = Callable[[Allocate | None], Feeder]
"""The memory of the slots, None for NumPy's → a feeder, not started."""

# The backend that a transport is bound to.
_PLATFORMS: dict[TransportName, str] = {"inplace": "cpu", "cuda": "cuda"}
# Batches that are enqueued before the host looks up again, for which the device waits. More would make that rarer, but
# the turns of a chunk that reaches beyond an evaluation compute for nothing.
_CHUNK_AHEAD = 10
# Of the steps, the share that may compute for nothing before that is said.
_MOST_WASTED = 0.05


def this_platform() -> str:
    """The backend that jax computes on by default: "cpu", "cuda", "rocm", "tpu" or another.

    Raises:
        ValueError: it has none.
    """
    try:
        platform = jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # as jax says it where no backend of $JAX_PLATFORMS is there
        asked = os.environ.get("JAX_PLATFORMS", "")
        raise ValueError(
            f"jax must find a device, and finds none with JAX_PLATFORMS={asked}{f' ({error})' if str(error) else ''}: "
            "for an NVIDIA card install the cuda extra and look at nvidia-smi (docs/nvidia.md), or unset the variable"
        ) from error
    if platform != "gpu":
        return platform
    return "cuda" if "cuda" in jax.devices()[0].client.platform_version.lower() else "rocm"


def this_device() -> str:
    """What that computes on, in the maker's words: "cpu", "NVIDIA H100 80GB HBM3"."""
    return str(_device().device_kind)


def choose_transport(name: TransportName, platform: str) -> Transport:
    """Gives the transport of that name, or for "auto" the fastest one that runs on `platform`, a `this_platform`.

    Raises:
        ValueError: where the named transport does not run on the platform.
        CudaError: where NVIDIA's driver does not answer.
    """
    if name == "auto":
        fitting: list[TransportName] = [each for each, needed in _PLATFORMS.items() if needed == platform]
        name = fitting[0] if fitting else "callback"
    needed = _PLATFORMS.get(name, platform)
    if platform != needed:
        remedy = " (install the cuda extra, docs/nvidia.md)" if name == "cuda" else ""
        raise ValueError(
            f"--transport {name} needs jax to compute on {needed}, and it computes on {platform}{remedy}: leave "
            "--transport out to take what suits it"
        )
    if name == "inplace":
        return InplaceTransport()
    if name == "callback":
        return CallbackTransport()
    from engine.crossing.cuda.driver import CudaDriver
    from engine.crossing.cuda.transport import CudaTransport

    return CudaTransport(CudaDriver(_device().local_hardware_id))


def _device() -> jax.Device:
    """The device that programs run on unless they are told otherwise."""
    chosen = jax.config.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0]


def make_infeed(
    transport: Transport,
    make_feeder: MakeFeeder,
    board: ControlBoard,
    *,
    words_of: WordsOf,
    chunk: int,
    times_waits: bool = True,
) -> BatchInfeed:
    """Return the infeed that goes with a transport; arguments as `engine.crossing.cuda.infeed.StreamedInfeed` takes."""
    if not transport.runs_ahead:
        return Infeed(make_feeder(None), board, transport, words_of=words_of, chunk=chunk, times_waits=times_waits)
    from engine.crossing.cuda.infeed import StreamedInfeed
    from engine.crossing.cuda.transport import CudaTransport

    assert isinstance(transport, CudaTransport)
    return StreamedInfeed(make_feeder, board, transport, words_of=words_of, chunk=chunk, times_waits=times_waits)


def choose_chunk(asked: int | None, transport: Transport) -> int:
    """Gives the batches a pull: as many as asked for, else one, or some where the host runs ahead of the device.

    A part of the program, and so not a matter of how long a run is or how often it is evaluated.
    """
    return asked or (_CHUNK_AHEAD if transport.runs_ahead else 1)


def told_waste(config: TrainConfig, chunk: int) -> str | None:
    """Gives a warning where many turns of the chunks, which all are made, come behind the last batch that is wanted."""
    cadences = [each for each in (config.eval_every_steps, config.snapshot_every_steps) if each]
    if not cadences and config.chunk_batches is None:
        # The run's last chunk alone has such turns, and nobody chose how many.
        return None
    # Batches between two places where the program has more to do than the next step.
    between = config.accumulate_steps * math.gcd(*(cadences or [config.steps]))
    wasted = -between % chunk
    if wasted <= _MOST_WASTED * between:
        return None
    return (
        f"warning: the program looks up every {between:,} batches, and of the {chunk} steps that are enqueued at once "
        f"{wasted} then compute for nothing: --chunk should divide {between:,}"
    )
