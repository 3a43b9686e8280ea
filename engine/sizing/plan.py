"""The plan of a run as numbers, which `loopfeed.engine.sizing.planning` fills in, the arithmetic, and its text.

Also the search for the largest batch whose program fits into the memory. Does not compile.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.sizing.flow import DECODE, DEVICES, READ, Flow, Stage, Volume
from loopfeed.preprocess.quantities import listed, quantity

START = "starting state, on the first device"
"""The part for the state that was copied to all devices."""
# The largest number of batch sizes that are compiled to find the largest one that fits.
_MOST_COMPILATIONS = 5

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
        num_steps, train_images: updates that are left, and their images.
        num_evaluations, eval_images: evaluations that are left, and images of each.
        volumes: the sizes of the packed splits by name.
        num_snapshots, snapshot_bytes: how many snapshots are kept at most, and the size of one.
        weights_bytes: size of the trained weights.
        num_lines: number of lines of the log of losses.
        stages: a line for each stage of a run with stages.
        is_imagenet: whether synthetic batches stand for ImageNet-1k.
    """

    subject: str
    place: Place
    memory: Memory
    flow: Flow
    num_steps: int
    train_images: int
    num_evaluations: int
    eval_images: int
    volumes: Sequence[tuple[str, Volume]]
    num_snapshots: int
    snapshot_bytes: int
    weights_bytes: int
    num_lines: int
    stages: Sequence[str] = ()
    is_imagenet: bool = False

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


class Analysed(NamedTuple):
    """XLA's analysis of a program for one device.

    Attributes:
        memory_bytes: memory by kind, as `loopfeed.engine.compilation.ahead_of_time.Compiled.memory_bytes`.
        step_flops: floating-point operations in a step, None if unknown.
        ring_bytes: host memory for the batches that are read ahead.
    """

    memory_bytes: Mapping[str, int]
    step_flops: float | None
    ring_bytes: int = 0


class LargestBatch(NamedTuple):
    """The largest compiled batch that fits (0 if none), the smallest that does not, and whether none lies between."""

    fits: int
    too_large: int
    is_settled: bool


def program_parts(memory_bytes: Mapping[str, int], state_bytes: int, num_devices: int) -> dict[str, int]:
    """Return what a program needs on one device, in bytes by part; what is reused for results is not counted twice.

    Args:
        memory_bytes: XLA's analysis.
        state_bytes: size of the training state.
        num_devices: number of devices; with several, the first also holds the state that was copied to all of them.
    """
    return {
        "arguments": memory_bytes.get("arguments", 0),
        "results, in new memory": memory_bytes.get("results", 0) - memory_bytes.get("reused", 0),
        "temporaries": memory_bytes.get("temporaries", 0),
        "code": memory_bytes.get("code", 0),
    } | ({START: state_bytes} if num_devices > 1 else {})


def batch_unit(config: TrainConfig, num_devices: int) -> int | None:
    """Return the number of images of which a smaller batch must be a multiple; None if the batch cannot be changed."""
    if config.resume:
        return None
    group = None if config.batch_norm_sync else config.batch_norm_group
    if group is None:
        return num_devices
    return num_devices * group if group <= config.batch // num_devices else None


def find_largest_batch(
    need_of: Callable[[int], int],
    limit_bytes: int,
    *,
    batch: int,
    need_bytes: int,
    fixed_bytes: int,
    unit: int,
    most_compilations: int = _MOST_COMPILATIONS,
) -> LargestBatch:
    """Search for the largest batch that fits, among multiples of `unit` that are about an eighth apart.

    The need is taken to grow with the batch. Each size is chosen by a straight line through the two known ones nearest
    to the limit.

    Args:
        need_of: batch → the bytes that it needs; compiles a program.
        limit_bytes: the bytes that there are.
        batch, need_bytes: a batch that does not fit, and the bytes that it needs.
        fixed_bytes: an estimate of the bytes that a batch of no images would need.
        unit: number of images of which a batch must be a multiple.
        most_compilations: the largest number of calls of `need_of`.
    """
    # Eight an octave: 96, 104, 112, …, 192, 208, …
    counts = [count for count in range(1, -(-batch // unit)) if count % max(1, (1 << count.bit_length()) // 16) == 0]
    sizes = [0, *(count * unit for count in counts), batch]
    needs = {batch: need_bytes}
    low, high = 0, len(sizes) - 1
    for _ in range(most_compilations):
        if high - low == 1:
            break
        too_large = sizes[high]
        other = sizes[low] if low else min((size for size in needs if size > too_large), default=0)
        slope = (needs[too_large] - needs.get(other, fixed_bytes)) / (too_large - other)
        line = too_large - (needs[too_large] - limit_bytes) / max(slope, 1e-9)
        guess = min(max(bisect_right(sizes, line) - 1, low + 1), high - 1)
        needs[sizes[guess]] = need_of(sizes[guess])
        low, high = (guess, high) if needs[sizes[guess]] <= limit_bytes else (low, guess)
    return LargestBatch(sizes[low], sizes[high], is_settled=high - low == 1)


_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400


def plan_lines(plan: Plan) -> list[str]:
    """Return the lines of a plan."""
    return [
        f"plan for {_describe_place(plan.place)}",
        f"  {plan.subject}",
        *["  synthetic batches stand for ImageNet-1k"] * plan.is_imagenet,
        "",
        *_memory_lines(plan),
        "",
        *_flow_lines(plan.flow, plan.place),
        "",
        *_work_lines(plan),
        "",
        *_disk_lines(plan),
        "",
        "dry run: nothing was trained",
    ]


def _describe_place(place: Place) -> str:
    if place.is_host_memory:
        count = f"{place.num_devices} devices of " if place.num_devices > 1 else ""
        return f"{count}the processor of this machine"
    devices = f"{place.num_devices:,} × {place.kind}" if place.num_devices > 1 else place.kind
    if place.num_hosts > 1:
        most = "up to " if place.num_devices % place.devices_per_host else ""
        devices += f", {place.num_hosts:,} hosts with {most}{quantity(place.devices_per_host, 'device')} each"
    return devices


def _memory_lines(plan: Plan) -> Iterator[str]:
    place, memory = plan.place, plan.memory
    where = "the host" if place.is_host_memory else "a device"
    how = "" if place.is_here else ", compiled for it without one"
    yield f"memory of {where}, by XLA's analysis{how}"
    sizes = {**memory.parts, "total": memory.total_bytes} if memory.parts else {}
    yield from (f"  {name:<36}{_size(size)}" for name, size in sizes.items())
    yield from (f"  {line}" for line in memory.verdict)
    if memory.step_flops is not None:
        yield f"  work of a batch: {memory.step_flops / 1e9:,.2f} GFLOP{' a device' * (place.num_devices > 1)}"


def _flow_lines(flow: Flow, place: Place) -> Iterator[str]:
    wanted = flow.wanted
    yield f"data of {'each host' if place.num_hosts > 1 else 'the host'}" + (
        "; how fast its devices train is not known: give --rate"
        if wanted is None
        else f", whose devices train on {wanted:,.0f} images/s"
    )
    yield f"  {'':<20}{'an image' if wanted is None else 'needed':>12}{'this machine':>14}{'images/s':>12}  how"
    for stage in flow.stages:
        needed = f"{stage.image_bytes / 1e3:,.1f} kB" if wanted is None else _rate(wanted * stage.image_bytes)
        yield f"  {stage.name:<20}{needed:>12}{_measured(stage)}  {stage.note}"
    if any(not stage.is_bounding for stage in flow.stages):
        yield "  the pack fits into the memory of this machine, so only the first epoch reads storage"


def _measured(stage: Stage) -> str:
    if stage.images_per_s is None:
        return f"{'-':>14}{'-':>12}"
    return f"{_rate(stage.images_per_s * stage.image_bytes):>14}{stage.images_per_s:>12,.0f}"


def _work_lines(plan: Plan) -> Iterator[str]:
    flow = plan.flow
    # A host with fewer devices than the others waits for them at every step.
    hosts = plan.place.num_devices / plan.place.devices_per_host
    evaluations = (
        f"; {quantity(plan.num_evaluations, 'evaluation')} of {quantity(plan.eval_images, 'image')}"
        if plan.num_evaluations
        else "; no evaluation"
    )
    yield f"run: {quantity(plan.num_steps, 'step')}, {quantity(plan.train_images, 'image')}{evaluations}"
    yield from (f"  {each}" for each in plan.stages)
    is_measured = any(each.images_per_s for each in flow.stages if each.name in (READ, DECODE))
    if flow.bound is None or (flow.wanted is None and not is_measured):
        yield "  how long it takes is not known: give --rate, the images/s that one device trains on"
        return
    name, images_per_s = flow.bound
    total = images_per_s * hosts
    if flow.wanted is None:
        yield f"  at most {total:,.0f} images/s, bound by: {name}"
        yield f"  takes at least {_duration(plan.seconds(total))}; --rate, the images/s of one device, tells more"
        return
    yield f"  {total:,.0f} images/s, bound by: {name}"
    if not plan.place.is_here and name != DEVICES:
        yield "  if each host reads, decodes and copies as fast as this machine"
    if plan.place.num_devices > 1:
        yield "  not counted: averaging the gradients over the devices"
    if unmeasured := [stage.name for stage in flow.stages if stage.is_bounding and stage.images_per_s is None]:
        yield f"  not measured, and not counted: {listed(unmeasured)}"
    if name != DEVICES:
        waiting = 1 - images_per_s / flow.wanted
        yield f"  the devices would train on {flow.wanted * hosts:,.0f}: they wait {waiting:.0%} of the time"
    yield f"  takes {_duration(plan.seconds(total))}"


def _duration(seconds: float) -> str:
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:,.0f} s"
    if seconds < 2 * _HOUR_S:
        return f"{seconds / _MINUTE_S:,.1f} min"
    return f"{seconds / _HOUR_S:,.1f} h" if seconds < 2 * _DAY_S else f"{seconds / _DAY_S:,.1f} days"


def _disk_lines(plan: Plan) -> Iterator[str]:
    yield "disk"
    for name, volume in plan.volumes:
        yield f"  shards of {name:<26}{_size(volume.disk_bytes)}  {quantity(volume.num_images, 'image')}"
        yield f"    by {volume.source}"
    if not plan.volumes:
        yield "  shards: none, because the batches are your own"
    snapshots = f"snapshots, at most {plan.num_snapshots}"
    yield f"  {snapshots:<36}{_size(plan.snapshot_bytes * plan.num_snapshots)}"
    yield f"  {'weights and logs, about':<36}{_size(plan.other_bytes)}"
    yield f"  {'total':<36}{_size(plan.disk_bytes)}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:>13,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:>13,.1f} MB"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:,.1f} MB/s"
