"""Choice of the devices that a run trains on, and of where its program is."""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import jax

from loopfeed.engine.config import MOST_PARTS, TrainConfig, parse_devices
from loopfeed.engine.crossing.choice import choose_chunk, choose_transport, this_device, this_platform
from loopfeed.engine.crossing.transport import Transport
from loopfeed.engine.settings import SettingError
from loopfeed.engine.xla_threads import spare_thread

_TERMINATE = "--xla_cpu_collective_call_terminate_timeout_seconds"
# Seconds for which a reduction may wait beyond the time limit of a batch.
_MARGIN_S = 60


class DeviceInfo(NamedTuple):
    """A device of this process on which a program can run.

    Attributes:
        platform: "cpu", "cuda", "rocm" or "tpu".
        kind: the vendor's name.
        number: its number among the local devices, from 0.
        memory_bytes: its memory in bytes; None if the runtime does not tell, as on a CPU.
    """

    platform: str
    kind: str
    number: int
    memory_bytes: int | None


def devices() -> list[DeviceInfo]:
    """Return the devices of this process, in the order in which `TrainConfig(devices=…)` counts them.

    Example:
        >>> devices()[0].number
        0
    """
    platform = this_platform()
    return [
        DeviceInfo(platform, str(each.device_kind), number, (each.memory_stats() or {}).get("bytes_limit"))
        for number, each in enumerate(jax.local_devices())
    ]


def settle_devices(config: TrainConfig) -> TrainConfig:
    """Return the settings of a new run with all devices of this machine in `devices`, if there are several.

    A record without the setting was therefore made on one device.
    """
    is_chosen = isinstance(jax.config.jax_default_device, jax.Device)
    if config.devices is not None or config.resume or is_chosen or (count := len(_local_devices())) == 1:
        return config
    return replace(config, devices=f"cpu:{count}" if this_platform() == "cpu" else str(count))


class Team(NamedTuple):
    """The devices that train together, and those of them that this process drives.

    Attributes:
        devices: all devices, those of each process together, in the order of the processes.
        own: the devices of this process.
    """

    devices: list[jax.Device]
    own: list[jax.Device]

    @property
    def first(self) -> int:
        """The number of this process's first device among all."""
        return self.devices.index(self.own[0])

    def rows(self, batch: int) -> range:
        """Return the rows of a batch that the devices of this process pull."""
        if batch % len(self.devices):
            raise SettingError(
                "batch",
                "{setting} must be a multiple of the number of devices, {num_devices}, got {found}",
                num_devices=len(self.devices),
                found=batch,
            )
        each = batch // len(self.devices)
        return range(self.first * each, (self.first + len(self.own)) * each)


class Placement(NamedTuple):
    """Where a program runs, or for which devices it is only compiled.

    Attributes:
        team: the devices, and those of them that one host drives.
        transport: the way in which the program calls the host.
        platform: the platform of the devices, such as "cpu".
        is_here: whether the devices are those of this machine.
    """

    team: Team
    transport: Transport
    platform: str
    is_here: bool = True

    def chunk_of(self, config: TrainConfig) -> int:
        """Return the number of training batches per pull.

        Raises:
            SettingError: several processes cannot pull so many.
        """
        chunk = choose_chunk(config.chunk_batches, self.transport)
        is_chosen = config.chunk_batches is not None or self.is_here
        if chunk > 1 and is_chosen and len(self.team.own) < len(self.team.devices):
            raise SettingError(
                "chunk_batches",
                "several processes pull one batch at a time, got {setting} {found}: leave it out",
                found=chunk,
            )
        return chunk


def place_here(config: TrainConfig) -> Placement:
    """Return the devices of this machine that the settings name, and the transport to them.

    Raises:
        ValueError: as `choose_team` and `choose_transport`.
    """
    platform, team = this_platform(), choose_team(config)
    return Placement(team, choose_transport(config.transport, platform, len(team.devices)), platform)


def choose_team(config: TrainConfig) -> Team:
    """Return the devices that train together: in each process, those that the setting `devices` names.

    Raises:
        SettingError: as `choose_devices`, or the processes have different numbers of devices.
    """
    own = choose_devices(config)
    if jax.process_count() == 1:
        return Team(own, own)
    numbers = [each.id for each in jax.local_devices()]
    places = [numbers.index(each.id) for each in own]
    by_process = [
        [each for each in jax.devices() if each.process_index == index] for index in range(jax.process_count())
    ]
    if any(len(each) <= max(places) for each in by_process):
        raise SettingError(
            "devices",
            "every process must have as many devices as {setting} names, {count}, but they have {found}: give fewer",
            count=len(own),
            found=", ".join(str(len(each)) for each in by_process),
        )
    return Team([each[place] for each in by_process for place in places], own)


def choose_devices(config: TrainConfig) -> list[jax.Device]:
    """Return the local devices that the setting `devices` names: the first of them, or jax's default device if None.

    "4" names four devices, "cpu:4" four parts of the processor, each a device of its own.

    Raises:
        SettingError: the text has another form, or there are fewer devices.
    """
    if config.devices is None:
        return [this_device()]
    platform, count = parse_devices(config.devices)
    if platform is not None and platform != this_platform():
        raise SettingError(
            "devices",
            "{setting} names devices of {platform}, but jax runs on {here}: leave out the platform, or choose "
            "another with the environment variable JAX_PLATFORMS",
            platform=platform,
            here=this_platform(),
        )
    found = _local_devices()
    if len(found) < count:
        remedy = "give fewer"
        if this_platform() == "cpu":
            remedy += (
                ", or cpu:{count}" * (count <= MOST_PARTS)
                if platform is None
                else ", or set the environment variable JAX_NUM_CPU_DEVICES={count}, because jax was used before"
            )
        raise SettingError(
            "devices",
            "{setting} must be at most {has}, the number of devices that jax has here, got {count}: " + remedy,
            count=count,
            has=len(found),
        )
    return found[:count]


def _local_devices() -> list[jax.Device]:
    this_platform()  # a clear error if there is none
    return jax.local_devices()


def split_processor(configs: Sequence[TrainConfig], *, has_user_source: bool = False) -> None:
    """Have jax make as many devices of the processor as settings `devices` ask for; call this before jax is used.

    Later, jax keeps the number that it has, and `choose_devices` refuses a larger one.

    Args:
        configs: the settings.
        has_user_source: whether code of the user makes the batches, which may use jax.
    """
    parsed = [parse_devices(each.devices) for each in configs if each.devices is not None]
    count = max((number for platform, number in parsed if platform == "cpu"), default=0)
    if has_user_source:
        spare_thread(max(count, jax.config.jax_num_cpu_devices, 1))
    if count <= max(jax.config.jax_num_cpu_devices, 1):
        return
    with suppress(RuntimeError):  # jax is in use
        jax.config.update("jax_num_cpu_devices", count)
        # While one device waits for its batch, the others wait in a reduction, which XLA ends after 40 s otherwise.
        flags = os.environ.get("XLA_FLAGS", "")
        if _TERMINATE not in flags:
            limit_s = math.ceil(max(each.infeed_timeout_s for each in configs)) + _MARGIN_S
            os.environ["XLA_FLAGS"] = f"{flags} {_TERMINATE}={limit_s}".strip()
