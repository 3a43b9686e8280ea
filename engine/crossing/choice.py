"""Choice of the transport, the infeed and the chunk length for this machine.

Owns only the choice; the implementations are in `loopfeed.engine.crossing.transport`, `loopfeed.engine.crossing.infeed`
and, for NVIDIA, `loopfeed.engine.crossing.cuda`.
"""

import math
import os

import jax

from loopfeed.engine.config import TrainConfig, TransportName
from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.crossing.infeed import BatchInfeed, Infeed, PullObserver, WordsOf
from loopfeed.engine.crossing.transport import CallbackTransport, InplaceTransport, Transport
from loopfeed.engine.feed.feeder import Feeder
from loopfeed.engine.xla_threads import check_not_forked, fitting_threads
from loopfeed.models.layers.platform_forms import PLATFORMS
from loopfeed.preprocess.quantities import quantity

# The only platform on which a transport runs.
_PLATFORMS: dict[TransportName, str] = {"inplace": "cpu", "cuda": "cuda"}
# Batches enqueued per pull if the host runs ahead; the device waits for the host at each pull. A
# longer chunk pulls less often, but its iterations past an evaluation are wasted.
_CHUNK_AHEAD = 10
# Share of wasted steps above which a warning is given.
_MOST_WASTED = 0.05


def this_platform() -> str:
    """Return the platform of jax's default backend, such as "cpu", "cuda", "rocm" or "tpu".

    Raises:
        ValueError: if jax finds no device.
        RuntimeError: if this process was forked from one that used jax.
    """
    check_not_forked()
    try:
        with fitting_threads():
            platform = jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # what jax raises if no backend of $JAX_PLATFORMS is available
        asked = os.environ.get("JAX_PLATFORMS", "")
        raise ValueError(
            f"jax found no device with JAX_PLATFORMS={asked}{f' ({error})' if str(error) else ''}: for an NVIDIA GPU, "
            "install the cuda extra and check that nvidia-smi lists the GPU (docs/nvidia.md); otherwise, unset the "
            "variable"
        ) from error
    return platform if platform != "gpu" else _gpu_platform(jax.devices()[0])


def traced_platform(device: jax.Device) -> str | None:
    """Return the platform for which layers are traced on a device that is here, as `tracing_for` takes it.

    It may differ from `this_platform` where a default device is set. On a platform of another backend of jax it is
    None, so that layers are traced in all forms.
    """
    platform = device.platform if device.platform != "gpu" else _gpu_platform(device)
    return platform if platform in PLATFORMS else None


def _gpu_platform(device: jax.Device) -> str:
    return "cuda" if "cuda" in device.client.platform_version.lower() else "rocm"


def this_device() -> jax.Device:
    """Return the device on which jax runs programs by default."""
    chosen = jax.config.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0]


def choose_transport(name: TransportName, platform: str, num_devices: int = 1) -> Transport:
    """Create the named transport, or, if the name is "auto", the fastest one for `platform` (see `this_platform`).

    Raises:
        ValueError: if the named transport does not run on the platform, or on so many devices.
        CudaError: if NVIDIA's driver fails.
    """
    if name == "auto":
        fitting: list[TransportName] = [each for each, needed in _PLATFORMS.items() if needed == platform]
        name = fitting[0] if fitting else "callback"
        if name == "cuda" and num_devices > 1:
            name = "callback"
    needed = _PLATFORMS.get(name, platform)
    if platform != needed:
        remedy = " (install the cuda extra, docs/nvidia.md)" if name == "cuda" else ""
        raise ValueError(
            f"--transport {name} requires jax to run on {needed}, but jax runs on {platform}{remedy}: omit "
            "--transport to use a suitable transport"
        )
    if name == "cuda" and num_devices > 1:
        raise ValueError(
            f"--transport cuda serves one device, but the run has {num_devices}: omit --transport, or give --devices 1"
        )
    if name == "inplace":
        return InplaceTransport()
    if name == "callback":
        return CallbackTransport()
    from loopfeed.engine.crossing.cuda.driver import CudaDriver
    from loopfeed.engine.crossing.cuda.transport import CudaTransport

    return CudaTransport(CudaDriver(this_device().local_hardware_id))


def make_infeed(
    transport: Transport,
    feeder: Feeder,
    board: ControlBoard,
    *,
    words_of: WordsOf,
    chunk: int,
    num_shards: int = 1,
    first_shard: int = 0,
    times_waits: bool = True,
    observer: PullObserver | None = None,
) -> BatchInfeed:
    """Create the infeed that suits a transport, with the arguments of `cuda.infeed.StreamedInfeed`."""
    if not transport.runs_ahead:
        return Infeed(
            feeder,
            board,
            transport,
            words_of=words_of,
            chunk=chunk,
            num_shards=num_shards,
            first_shard=first_shard,
            times_waits=times_waits,
            observer=observer,
        )
    from loopfeed.engine.crossing.cuda.infeed import StreamedInfeed
    from loopfeed.engine.crossing.cuda.transport import CudaTransport

    assert isinstance(transport, CudaTransport)
    return StreamedInfeed(
        feeder, board, transport, words_of=words_of, chunk=chunk, times_waits=times_waits, observer=observer
    )


def choose_chunk(asked: int | None, transport: Transport) -> int:
    """Return the number of batches per pull: `asked` if given, else 10 if the host runs ahead of the device, else 1.

    The number is compiled into the program, so it does not depend on the length of the run or on how often it is
    evaluated.
    """
    return asked or (_CHUNK_AHEAD if transport.runs_ahead else 1)


def wasted_steps_warning(config: TrainConfig, chunk: int) -> str | None:
    """Return a warning if many steps are wasted because interruptions of the run fall inside chunks.

    Evaluations, snapshots and the end of the run interrupt the steps, but a chunk always runs all its iterations.
    """
    cadences = [each for each in (config.eval_every_steps, config.snapshot_cadence) if each]
    if not cadences and config.chunk_batches is None:
        # Only the last chunk of the run wastes steps, and the user did not choose the chunk length.
        return None
    # Batches between two interruptions of the steps, by an evaluation or a snapshot.
    between = config.accumulate_steps * math.gcd(*(cadences or [config.steps]))
    wasted = -between % chunk
    if wasted <= _MOST_WASTED * between:
        return None
    return (
        f"warning: an evaluation, a snapshot or the end of the run comes every {quantity(between, 'batch')}, "
        "which wastes "
        f"{wasted} of the last chunk's {chunk} steps: choose a --chunk that divides {between:,}"
    )
