"""The plan of a run as lines of text, at most 80 characters wide except for names and reasons."""

from collections.abc import Iterator

from loopfeed.engine.sizing.flow import DECODE, DEVICES, READ, Flow, Stage
from loopfeed.engine.sizing.plan import Place, Plan
from loopfeed.preprocess.quantities import listed, quantity

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
