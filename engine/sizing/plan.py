"""The plan of a run as numbers, and the arithmetic between them: bytes per second, what bounds the run, time, disk.

Needs no jax; `loopfeed.engine.sizing.planning` fills it in, and `loopfeed.engine.sizing.report` prints it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from loopfeed.engine.sizing.memory import LargestBatch, MemoryNeed
from loopfeed.engine.sizing.volumes import Volume

# A line of `loss.jsonl`, which grows with the digits of the step, in bytes.
_LOG_LINE_BYTES = 120
DEVICES = "the devices"
READ, DECODE, COPY, LINK = "read from storage", "check and decode", "copy in memory", "copy to devices"
"""The names of the stages."""


@dataclass(frozen=True)
class Place:
    """The devices of a plan.

    Attributes:
        kind: the vendor's name of a device.
        num_devices, devices_per_host, num_hosts: how many there are.
        limit_bytes: the memory that programs and arrays may take, of one device, or of the host if devices have none of
            their own; None if unknown.
        limit_note: what the limit is, in words.
        is_host_memory: whether the devices compute in the host's memory.
        is_here: whether they are this machine's.
        num_sharing: number of processes that share the memory of this machine, each with as many devices.
    """

    kind: str
    num_devices: int
    devices_per_host: int
    num_hosts: int
    limit_bytes: int | None
    limit_note: str
    is_host_memory: bool
    is_here: bool
    num_sharing: int = 1


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one device, or of the host if the devices have none of their own.

    Attributes:
        need: what the run needs; None if it is not known.
        unknown_because: why it is not known.
        largest: the largest batch that fits; None if the run fits, or no smaller batch was tried.
        untried_because: why no smaller batch was tried, if the run does not fit.
        step_flops: floating-point operations of one device in a step, None if unknown.
    """

    need: MemoryNeed | None
    unknown_because: str | None = None
    largest: LargestBatch | None = None
    untried_because: str | None = None
    step_flops: float | None = None


@dataclass(frozen=True)
class Stage:
    """One of the stages through which images come to the devices of a host.

    Attributes:
        name: what is done.
        image_bytes: bytes that it moves for each image.
        images_per_s: images per second that a host can do, None if that was not measured.
        note: how it was measured, or why not.
        is_bounding: whether every image passes through the stage again in every epoch.
    """

    name: str
    image_bytes: float
    images_per_s: float | None
    note: str
    is_bounding: bool = True


@dataclass(frozen=True)
class Flow:
    """The images per second of one host.

    Attributes:
        stages: how the images come to the devices.
        devices_per_host: number of devices of the host.
        device_rate: images per second that one device trains on, None if unknown.
    """

    stages: Sequence[Stage]
    devices_per_host: int
    device_rate: float | None

    @property
    def wanted(self) -> float | None:
        """The images per second that the devices of a host can train on, None if unknown."""
        return None if self.device_rate is None else self.device_rate * self.devices_per_host

    @property
    def bound(self) -> tuple[str, float] | None:
        """What bounds the run, and the images per second of one host that it leaves; None if nothing is known."""
        known = [(each.name, each.images_per_s) for each in self.stages if each.is_bounding and each.images_per_s]
        if self.wanted is not None:
            known.insert(0, (DEVICES, self.wanted))
        return min(known, key=lambda each: each[1]) if known else None


@dataclass(frozen=True)
class Work:
    """How much there is to do.

    Attributes:
        num_steps: updates that are left.
        images_per_step: images of an update, over all devices and accumulated batches.
        num_evaluations, eval_images: number of evaluations that are left, and images of each.
    """

    num_steps: int
    images_per_step: int
    num_evaluations: int
    eval_images: int

    @property
    def train_images(self) -> int:
        """Images to train on."""
        return self.num_steps * self.images_per_step

    def seconds(self, images_per_s: float) -> float:
        """Return how long the run takes; evaluated images count as trained ones, although they take less."""
        return (self.train_images + self.num_evaluations * self.eval_images) / images_per_s


def count_evaluations(start_step: int, steps: int, every: int) -> int:
    """Return the number of evaluations after `start_step`: at each multiple of `every`, if not 0, and at the end."""
    if start_step >= steps:
        return 0
    return ceil(steps / every) - start_step // every if every else 1


@dataclass(frozen=True)
class Disk:
    """The space that a run takes on disk.

    Attributes:
        volumes: the splits, by name.
        snapshot_bytes, num_snapshots: size of a snapshot, and how many are kept.
        weights_bytes: size of the trained weights.
        num_lines: number of lines of the log of losses.
    """

    volumes: Sequence[tuple[str, Volume]]
    snapshot_bytes: int
    num_snapshots: int
    weights_bytes: int
    num_lines: int

    @property
    def shard_bytes(self) -> int:
        """The size of all shards."""
        return sum(volume.disk_bytes for _, volume in self.volumes)

    @property
    def log_bytes(self) -> int:
        """The estimated size of the logs."""
        return self.num_lines * _LOG_LINE_BYTES

    @property
    def run_bytes(self) -> int:
        """The size of the run folder."""
        return self.snapshot_bytes * self.num_snapshots + self.weights_bytes + self.log_bytes


def count_snapshots(steps: int, *, every: int, keep: int, keeps_best: bool) -> int:
    """Return how many snapshots a run folder has at most: the newest `keep` (0: all), and the best one.

    A resumed run still has those of its earlier launches.
    """
    taken = count_evaluations(0, steps, every)
    # While a snapshot is written, the one that it replaces is still there.
    return taken if keep == 0 else min(taken, keep + keeps_best + 1)


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Attributes:
        subject: the model and the batch, in words.
        place: the devices.
        memory: the memory of a device.
        flow: the images per second of a host.
        work: how much there is to do.
        disk: the space on disk.
        notes: what else must be known to read the plan.
    """

    subject: str
    place: Place
    memory: MemoryPlan
    flow: Flow
    work: Work
    disk: Disk
    notes: Sequence[str] = ()
