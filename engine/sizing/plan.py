"""The plan of a run as numbers, which `loopfeed.engine.sizing.planning` fills in, and the arithmetic between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from loopfeed.engine.sizing.flow import Flow
from loopfeed.engine.sizing.volumes import Volume

# A line of `loss.jsonl`, which grows with the digits of the step, in bytes.
_LOG_LINE_BYTES = 120


@dataclass(frozen=True)
class Place:
    """The devices of a plan.

    Attributes:
        kind: the vendor's name of a device.
        num_devices, devices_per_host: how many there are.
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
    limit_bytes: int | None
    limit_note: str
    is_host_memory: bool
    is_here: bool
    num_sharing: int = 1

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return ceil(self.num_devices / self.devices_per_host)


@dataclass(frozen=True)
class Memory:
    """The memory of one device, or of the host if the devices have none of their own.

    Attributes:
        parts: the bytes of each part, by its description; empty if they are not known.
        verdict: whether that fits, and if not, which batch does; or why it is not known.
        step_flops: floating-point operations of one device in a step, None if unknown.
    """

    parts: Mapping[str, int]
    verdict: Sequence[str]
    step_flops: float | None = None

    @property
    def total_bytes(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Attributes:
        subject: the model and the batch, in words.
        place, memory, flow: the devices, the memory of one, and the images per second of a host.
        num_steps, images_per_step: updates that are left, and images of each over all devices and accumulated batches.
        num_evaluations, eval_images: evaluations that are left, and images of each.
        volumes: the sizes of the packed splits by name.
        num_snapshots, snapshot_bytes: how many snapshots are kept at most, and the size of one.
        weights_bytes: size of the trained weights.
        num_lines: number of lines of the log of losses.
        is_imagenet: whether synthetic batches stand for ImageNet-1k.
    """

    subject: str
    place: Place
    memory: Memory
    flow: Flow
    num_steps: int
    images_per_step: int
    num_evaluations: int
    eval_images: int
    volumes: Sequence[tuple[str, Volume]]
    num_snapshots: int
    snapshot_bytes: int
    weights_bytes: int
    num_lines: int
    is_imagenet: bool = False

    @property
    def train_images(self) -> int:
        """Images to train on."""
        return self.num_steps * self.images_per_step

    @property
    def other_bytes(self) -> int:
        """The size of weights and logs, about."""
        return self.weights_bytes + self.num_lines * _LOG_LINE_BYTES

    @property
    def disk_bytes(self) -> int:
        """The space that shards and run folder take on disk."""
        shard_bytes = sum(volume.disk_bytes for _, volume in self.volumes)
        return shard_bytes + self.snapshot_bytes * self.num_snapshots + self.other_bytes

    def seconds(self, images_per_s: float) -> float:
        """Return how long the run takes; evaluated images count as trained ones, although they take less."""
        return (self.train_images + self.num_evaluations * self.eval_images) / images_per_s


def count_evaluations(start_step: int, steps: int, every: int) -> int:
    """Return the number of evaluations after `start_step`: at each multiple of `every`, if not 0, and at the end."""
    if start_step >= steps:
        return 0
    return ceil(steps / every) - start_step // every if every else 1


def count_snapshots(steps: int, *, every: int, keep: int, keeps_best: bool) -> int:
    """Return how many snapshots a run folder has at most: the newest `keep` (0: all), and the best one.

    A resumed run still has those of its earlier launches.
    """
    taken = count_evaluations(0, steps, every)
    # While a snapshot is written, the one that it replaces is still there.
    return taken if keep == 0 else min(taken, keep + keeps_best + 1)
