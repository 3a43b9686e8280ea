"""Makes the plan of a run: opens it, has its program analysed, and measures this machine.

The program is compiled here for the devices of this machine, or by another process for GPUs that are not here.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.crossing.devices import devices
from loopfeed.engine.feed.batches import EvaluationSource
from loopfeed.engine.feed.shard_batches import SequentialBatches, ShardBatches
from loopfeed.engine.feed.windowed_batches import WindowedBatches
from loopfeed.engine.peers import SEES_ALL
from loopfeed.engine.processes import this_process
from loopfeed.engine.run.open_run import OpenRun, open_run
from loopfeed.engine.run.parts import OwnParts
from loopfeed.engine.run.result import RunFacts
from loopfeed.engine.sizing.absent_cards import card_placement, stand_ins
from loopfeed.engine.sizing.card_compiler import CardCompilerError, CardRequest, compile_for_cards
from loopfeed.engine.sizing.cards import CARDS, SHARE_VARIABLE, Card, memory_share
from loopfeed.engine.sizing.flow import measure_flow
from loopfeed.engine.sizing.imagenet import BlackImages, stand_for_imagenet
from loopfeed.engine.sizing.memory import START, MemoryNeed, batch_unit, find_largest_batch, program_parts
from loopfeed.engine.sizing.plan import Disk, MemoryPlan, Place, Plan, Work, count_evaluations, count_snapshots
from loopfeed.engine.sizing.volumes import IMAGENET_VAL, Volume, imagenet_volume, split_volume
from loopfeed.preprocess.memory import host_memory_bytes, process_memory_bytes
from loopfeed.preprocess.quantities import quantity

type Notify = Callable[[str], None]
type Analyse = Callable[[int], Analysed]
"""Batch → XLA's analysis of the program for it."""


class Analysed(NamedTuple):
    """XLA's analysis of a program, and the host memory for the batches that it reads ahead, in bytes."""

    memory_bytes: Mapping[str, int]
    step_flops: float | None
    ring_bytes: int

    @classmethod
    def of(cls, run: OpenRun) -> Self:
        """Compile the program of a run for the devices of this machine, and return its analysis."""
        compiled = run.plan().compiled
        return cls(compiled.memory_bytes, compiled.step_flops, run.facts.ring_bytes)


@dataclass(frozen=True)
class Target:
    """GPUs that are not here.

    Attributes:
        card: the name of their kind, in `CARDS`.
        num_devices, devices_per_host: how many there are.
    """

    card: str
    num_devices: int
    devices_per_host: int


def plan_here(config: TrainConfig, parts: OwnParts, notify: Notify, device_rate: float | None = None) -> Plan:
    """Return the plan of a run on the devices of this machine.

    Args:
        config, parts, notify: as `loopfeed.engine.run.open_run.open_run`.
        device_rate: images per second that one device trains on, None if unknown.
    """
    given = parts
    config, parts = stand_for_imagenet(config, given, notify)

    def analyse(batch: int) -> Analysed:
        notify(f"compiling for --batch {batch}")
        smaller = replace(config, batch=batch, compilation_cache="off", dump_hlo=None)
        with open_run(*stand_for_imagenet(smaller, given, _ignore), _ignore, is_dry=True) as run:
            return Analysed.of(run)

    with open_run(config, parts, notify, is_dry=True) as run:
        first, place = Analysed.of(run), _place_here(run.facts)
        # What the host needs beside the program: Python, the compiler and its results.
        name = "this process so far" if place.num_sharing == 1 else "each process so far"
        beside = {name: process_memory_bytes() or 0} if place.is_host_memory else {}
        memory = _judge(place, run.facts, first, analyse, beside, has_own_batches=given.batches is not None)
        return _complete(run, place, memory, device_rate, None)


def plan_for_cards(
    config: TrainConfig,
    parts: OwnParts,
    part_names: Mapping[str, str],
    target: Target,
    notify: Notify,
    *,
    program: str,
    device_rate: float | None = None,
) -> Plan:
    """Return the plan of a run on GPUs that are not here.

    Args:
        config, parts, notify: as `loopfeed.engine.run.open_run.open_run`; the setting `devices` is that of the target.
        part_names: the names of the user's own parts, for the process that compiles.
        target: the GPUs.
        program: the program of that process, as `compile_for_cards` takes it.
        device_rate: images per second that one device trains on, None if unknown.
    """
    card = CARDS[target.card]
    config, parts = stand_for_imagenet(config, parts, notify)
    config = replace(config, devices=str(target.num_devices), transport="auto")
    placement = card_placement(stand_ins(card, target.num_devices), target.devices_per_host)
    place = _place_of(card, target)

    def analyse(batch: int) -> Analysed:
        notify(f"compiling for --batch {batch} on {_count_of(place)}, in seconds to minutes")
        smaller = config if batch == config.batch else replace(config, batch=batch, dump_hlo=None)
        found = compile_for_cards(_request(smaller, part_names, target), program)
        return Analysed(found.memory_bytes, found.step_flops, 0)

    with open_run(config, parts, notify, is_dry=True, placement=placement) as run:
        try:
            first = analyse(config.batch)
        except CardCompilerError as error:
            memory = MemoryPlan(None, unknown_because=str(error))
        else:
            memory = _judge(place, run.facts, first, analyse, {}, has_own_batches=parts.batches is not None)
        return _complete(run, place, memory, device_rate, card)


def _request(config: TrainConfig, part_names: Mapping[str, str], target: Target) -> CardRequest:
    """Return a request for the program of a new run, which is that of a resumed one, without what it only reads."""
    config = replace(config, resume=False, run_dir=None, overwrite=False, init_from=None, compilation_cache="off")
    return CardRequest(config.to_json(), part_names, target.card, target.num_devices, target.devices_per_host)


def _place_here(facts: RunFacts) -> Place:
    found, num_processes = devices()[0], this_process().count
    is_host_memory = found.platform == "cpu"
    return Place(
        kind="the processor" if is_host_memory else found.kind,
        num_devices=facts.num_devices,
        devices_per_host=facts.num_own_devices,
        num_hosts=num_processes,
        limit_bytes=host_memory_bytes() if is_host_memory else found.memory_bytes,
        limit_note="this machine has" if is_host_memory else "jax takes",
        is_host_memory=is_host_memory,
        is_here=True,
        # Processes that were not started together are taken to be on different hosts.
        num_sharing=num_processes if SEES_ALL in os.environ else 1,
    )


def _place_of(card: Card, target: Target) -> Place:
    share = memory_share()
    return Place(
        kind=card.name,
        num_devices=target.num_devices,
        devices_per_host=min(target.num_devices, target.devices_per_host),
        num_hosts=-(-target.num_devices // target.devices_per_host),
        limit_bytes=card.usable_bytes,
        limit_note=f"jax takes {share:g} ({SHARE_VARIABLE}) of {card.memory_bytes / 1e9:.1f} GB,",
        is_host_memory=False,
        is_here=False,
    )


def _count_of(place: Place) -> str:
    return f"{place.num_devices} × {place.kind}" if place.num_devices > 1 else place.kind


def _need(place: Place, facts: RunFacts, analysed: Analysed, beside: Mapping[str, int]) -> MemoryNeed:
    """Return the memory of one device; on the processor that of all its devices, with what the host needs beside."""
    parts = program_parts(analysed.memory_bytes, facts.state_bytes, place.num_devices)
    if not place.is_host_memory:
        return MemoryNeed(parts)
    # The copy of the starting state is only on the first device of a process.
    whole = {name: size * (1 if name == START else place.devices_per_host) for name, size in parts.items()}
    whole |= {"batches read ahead": analysed.ring_bytes, **beside}
    return MemoryNeed({name: size * place.num_sharing for name, size in whole.items()})


def _judge(
    place: Place,
    facts: RunFacts,
    first: Analysed,
    analyse: Analyse,
    beside: Mapping[str, int],
    *,
    has_own_batches: bool,
) -> MemoryPlan:
    """Compare what the run needs with what there is; if it is more, look for the largest batch that fits."""
    batch, limit = facts.config.batch, place.limit_bytes
    need = _need(place, facts, first, beside)
    plan = partial(MemoryPlan, need, step_flops=first.step_flops)
    if limit is None or need.total_bytes <= limit:
        return plan()
    unit = batch_unit(facts.config, place.num_devices)
    if has_own_batches or unit is None:
        return plan(untried_because="the batch of this run cannot be changed")
    if batch < 2 * unit:
        return plan(untried_because="it is already the smallest that can be divided among the devices")
    if this_process().count > 1:
        # They would have to try the same ones.
        return plan(untried_because="several processes make this plan")
    copies = place.devices_per_host if place.is_host_memory else 1
    try:
        largest = find_largest_batch(
            lambda size: _need(place, facts, analyse(size), beside).total_bytes,
            limit,
            batch=batch,
            need_bytes=need.total_bytes,
            fixed_bytes=facts.state_bytes * copies + sum(beside.values()),
            unit=unit,
        )
    except CardCompilerError as error:
        return plan(untried_because=str(error))
    return plan(largest=largest)


def _complete(run: OpenRun, place: Place, memory: MemoryPlan, device_rate: float | None, card: Card | None) -> Plan:
    """Measure this machine, and return the plan."""
    facts = run.facts
    config, data = facts.config, facts.resolved.data
    volumes = _volumes(facts)
    spare = None
    if place.is_here and (host_bytes := host_memory_bytes()) is not None:
        used = facts.ring_bytes * place.num_sharing
        if memory.need is not None and place.is_host_memory:
            used = memory.need.total_bytes
        spare = host_bytes - used
    flow = measure_flow(
        config,
        data.source,
        volumes[0][1] if volumes else None,
        place,
        spare_bytes=spare,
        card=card,
        device_rate=device_rate,
    )
    height, width = (config.image_size,) * 2 if config.image_size else (data.source.height, data.source.width)
    notes = ["synthetic batches stand for ImageNet-1k"] * config.synthetic
    each = f" ({config.batch // place.num_devices:,} on each device)" if place.num_devices > 1 else ""
    subject = (
        f"{facts.resolved.model_name}, {quantity(facts.num_params, 'parameter')}, batch {config.batch:,}{each} of "
        f"{height} × {width} px, {config.precision}"
    )
    return Plan(subject, place, memory, flow, _work(facts), _disk(facts, volumes), notes)


def _volumes(facts: RunFacts) -> list[tuple[str, Volume]]:
    """Return the sizes of the training split and of the evaluation split; none for batches of the user's own."""
    config, data = facts.config, facts.resolved.data
    if config.synthetic:
        size = data.source.height
        return [("train", imagenet_volume(size)), ("val", imagenet_volume(size, IMAGENET_VAL))]
    found = (data.source, data.evaluation)
    splits = [each.split for each in found if isinstance(each, ShardBatches | WindowedBatches | SequentialBatches)]
    return [(split.location.display.rstrip("/").rpartition("/")[2], split_volume(split)) for split in splits]


def _work(facts: RunFacts) -> Work:
    config, evaluated = facts.config, facts.resolved.data.evaluation
    eval_images = _count_images(evaluated)
    every = config.eval_every_steps or 0
    return Work(
        num_steps=max(config.steps - facts.start_step, 0),
        images_per_step=config.batch * config.accumulate_steps,
        num_evaluations=count_evaluations(facts.start_step, config.steps, every) * bool(eval_images),
        eval_images=eval_images,
    )


def _count_images(evaluated: EvaluationSource | None) -> int:
    if isinstance(evaluated, SequentialBatches):
        return evaluated.split.num_images
    if isinstance(evaluated, BlackImages):
        return IMAGENET_VAL
    return 0 if evaluated is None else evaluated.num_batches * evaluated.batch


def _disk(facts: RunFacts, volumes: list[tuple[str, Volume]]) -> Disk:
    config = facts.config
    # Of snapshots by the clock, as many as are kept.
    is_by_clock = config.snapshot_every_steps is None and config.keep_snapshots > 0
    return Disk(
        volumes,
        snapshot_bytes=facts.state_bytes,
        num_snapshots=count_snapshots(
            config.steps,
            every=1 if is_by_clock else config.snapshot_cadence,
            keep=config.keep_snapshots,
            keeps_best=config.keep_best is not None,
        ),
        weights_bytes=4 * facts.num_params,
        num_lines=config.steps,
    )


def _ignore(_: str) -> None:
    """Ignore a message."""
