"""Makes the plan of a run: opens it, has its program analysed, and measures this machine.

The program is compiled here for the devices of this machine, or by another process for GPUs that are not here.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from loopfeed.engine.config import COUNTED_IN_EPOCHS, SYNTHETIC_IMAGE_SIZE, TrainConfig
from loopfeed.engine.crossing.devices import devices
from loopfeed.engine.feed.batches import Labels, Pixels, image_shape
from loopfeed.engine.feed.shard_batches import SequentialBatches, ShardBatches, WindowedBatches
from loopfeed.engine.parts import UserParts
from loopfeed.engine.peers import SEES_ALL
from loopfeed.engine.processes import this_process
from loopfeed.engine.run.compiling import plan_program
from loopfeed.engine.run.epochs import settle_epochs, settle_evaluations
from loopfeed.engine.run.run import Run
from loopfeed.engine.run.run_stages import describe_stages
from loopfeed.engine.run.train import set_up_run
from loopfeed.engine.sizing.absent_cards import CardCompilerError, card_placement, compile_for_cards, stand_ins
from loopfeed.engine.sizing.cards import CARDS, SHARE_VARIABLE, memory_share
from loopfeed.engine.sizing.flow import (
    IMAGENET_TRAIN,
    IMAGENET_VAL,
    Volume,
    imagenet_volume,
    measure_flow,
    split_volume,
)
from loopfeed.engine.sizing.plan import (
    START,
    Analysed,
    Memory,
    Place,
    Plan,
    batch_unit,
    count_evaluations,
    count_snapshots,
    find_largest_batch,
    program_parts,
)
from loopfeed.engine.stages import in_steps
from loopfeed.preprocess.control_groups import host_memory_bytes, process_memory_bytes
from loopfeed.preprocess.quantities import quantity

type Notify = Callable[[str], None]


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


def plan_here(config: TrainConfig, parts: UserParts, notify: Notify, device_rate: float | None = None) -> Plan:
    """Return the plan of a run on the devices of this machine.

    Args:
        config, parts, notify: as `loopfeed.engine.run.train.set_up_run`.
        device_rate: images per second that one device trains on, None if unknown.
    """
    given = parts
    config, parts = stand_for_imagenet(config, given, notify)

    def analyse(batch: int) -> Analysed:
        notify(f"compiling for --batch {batch}")
        smaller = replace(config, batch=batch, compilation_cache="off", dump_hlo=None)
        with set_up_run(*stand_for_imagenet(smaller, given, _ignore), _ignore, is_dry=True) as run:
            return _analysed(run)

    with set_up_run(config, parts, notify, is_dry=True) as run:
        first, place = _analysed(run), _place_here(run)
        # What the host needs beside the program: Python, the compiler and its results.
        name = "this process so far" if place.num_sharing == 1 else "each process so far"
        beside = {name: process_memory_bytes() or 0} if place.is_host_memory else {}
        has_fixed_batch = given.batches is not None or config.changes_batch
        memory = _judge(place, run, first, analyse, beside, has_fixed_batch=has_fixed_batch)
        plan = _complete(run, place, memory, device_rate)
    return plan if config.stages is None else replace(plan, stages=_with_work(plan.stages, config, parts, notify))


def _with_work(stages: Sequence[str], config: TrainConfig, parts: UserParts, notify: Notify) -> tuple[str, ...]:
    """Return the lines about stages with the work of a batch of each; each is compiled alone."""
    found = []
    for number, line in enumerate(stages):
        notify(f"compiling stage {number + 1} alone")
        with set_up_run(config, parts, _ignore, is_dry=True) as run:
            run.keep_stage(number)
            run.evaluation_infeed = None  # whose work XLA would count too
            flops = plan_program(run).compiled.step_flops
        found.append(line if flops is None else f"{line}; {flops / 1e9:,.2f} GFLOP a batch")
    return tuple(found)


def plan_for_cards(
    config: TrainConfig,
    parts: UserParts,
    part_names: Mapping[str, str],
    target: Target,
    notify: Notify,
    *,
    program: str,
    device_rate: float | None = None,
) -> Plan:
    """Return the plan of a run on GPUs that are not here.

    Args:
        config, parts, notify: as `loopfeed.engine.run.train.set_up_run`; the setting `devices` is that of the target.
        part_names: the names of the user's own parts, for the process that compiles.
        target: the GPUs.
        program: the program of that process, as `compile_for_cards` takes it.
        device_rate: images per second that one device trains on, None if unknown.
    """
    card, share = CARDS[target.card], memory_share()
    config, parts = stand_for_imagenet(config, parts, notify)
    config = replace(config, devices=str(target.num_devices), transport="auto")
    placement = card_placement(stand_ins(card, target.num_devices), target.devices_per_host)
    place = Place(
        kind=card.name,
        num_devices=target.num_devices,
        devices_per_host=min(target.num_devices, target.devices_per_host),
        limit_bytes=card.usable_bytes,
        limit_note=f"jax takes {share:g} ({SHARE_VARIABLE}) of {card.memory_bytes / 1e9:.1f} GB,",
        is_host_memory=False,
        is_here=False,
    )
    named = f"{place.num_devices} × {place.kind}" if place.num_devices > 1 else place.kind

    def analyse(batch: int) -> Analysed:
        notify(f"compiling for --batch {batch} on {named}, in seconds to minutes")
        # The program of a new run is that of a resumed one, without what it only reads.
        new = replace(config, resume=False, run_dir=None, overwrite=False, init_from=None, compilation_cache="off")
        new = new if batch == config.batch else replace(new, batch=batch, dump_hlo=None)
        return compile_for_cards({"settings": new.to_json(), "parts": part_names, **vars(target)}, program)

    with set_up_run(config, parts, notify, is_dry=True, placement=placement) as run:
        try:
            first = analyse(config.batch)
        except CardCompilerError as error:
            memory = Memory({}, [f"not known: {error}"])
        else:
            has_fixed_batch = parts.batches is not None or config.changes_batch
            memory = _judge(place, run, first, analyse, {}, has_fixed_batch=has_fixed_batch)
        return _complete(run, place, memory, device_rate, card.link_bytes_per_s * place.devices_per_host)


def _analysed(run: Run) -> Analysed:
    """Compile the program of a run for the devices of this machine, and return its analysis."""
    compiled = plan_program(run).compiled
    return Analysed(compiled.memory_bytes, compiled.step_flops, run.ring_bytes)


def _place_here(run: Run) -> Place:
    found = devices()[0]
    is_host_memory = found.platform == "cpu"
    return Place(
        kind="the processor" if is_host_memory else found.kind,
        num_devices=len(run.team.devices),
        devices_per_host=len(run.team.own),
        limit_bytes=host_memory_bytes() if is_host_memory else found.memory_bytes,
        limit_note="this machine has" if is_host_memory else "jax takes",
        is_host_memory=is_host_memory,
        is_here=True,
        # Processes that were not started together are taken to be on different hosts.
        num_sharing=this_process().count if SEES_ALL in os.environ else 1,
    )


def _need(place: Place, run: Run, analysed: Analysed, beside: Mapping[str, int]) -> dict[str, int]:
    """Return the memory of one device; on the processor that of all its devices, with what the host needs beside."""
    parts = program_parts(analysed.memory_bytes, run.state_bytes, place.num_devices)
    if not place.is_host_memory:
        return parts
    # The copy of the starting state is only on the first device of a process.
    whole = {name: size * (1 if name == START else place.devices_per_host) for name, size in parts.items()}
    whole |= {"batches read ahead": analysed.ring_bytes, **beside}
    return {name: size * place.num_sharing for name, size in whole.items()}


def _judge(
    place: Place,
    run: Run,
    first: Analysed,
    analyse: Callable[[int], Analysed],
    beside: Mapping[str, int],
    *,
    has_fixed_batch: bool,
) -> Memory:
    """Compare what the run needs with what there is; if it is more, look for the largest batch that fits."""
    parts, limit = _need(place, run, first, beside), place.limit_bytes
    total = sum(parts.values())
    if limit is None:
        verdict = ["whether that fits is not known, because the size of the memory is not"]
    else:
        verdict = [f"{'fits' if total <= limit else 'does not fit'}: {place.limit_note} {limit / 1e9:,.1f} GB"]
    if limit is not None and total > limit:
        batch, unit = run.config.batch, batch_unit(run.config, place.num_devices)
        if has_fixed_batch or unit is None:
            found = "no smaller batch was tried: the batch of this run cannot be changed"
        elif batch < 2 * unit:
            found = "no smaller batch was tried: it is already the smallest that can be divided among the devices"
        elif this_process().count > 1:
            # They would have to try the same ones.
            found = "no smaller batch was tried: several processes make this plan"
        else:
            copies = place.devices_per_host if place.is_host_memory else 1
            fixed_bytes = run.state_bytes * copies + sum(beside.values())

            def need_of(size: int) -> int:
                return sum(_need(place, run, analyse(size), beside).values())

            found = _search(need_of, limit, batch, total, fixed_bytes, unit)
        verdict.append(found)
    # XLA counts the loops of all stages.
    return Memory(parts, verdict, first.step_flops if run.config.stages is None else None)


def _search(need_of: Callable[[int], int], limit: int, batch: int, need_bytes: int, fixed_bytes: int, unit: int) -> str:
    """Return which batch fits, in words."""
    try:
        fits, too_large, is_settled = find_largest_batch(
            need_of, limit, batch=batch, need_bytes=need_bytes, fixed_bytes=fixed_bytes, unit=unit
        )
    except CardCompilerError as error:
        return f"no smaller batch was tried: {error}"
    if fits == 0:
        return f"--batch {too_large} does not fit either"
    settled = "" if is_settled else "; sizes between them were not tried"
    return f"the largest --batch that fits is {fits} ({too_large} does not{settled})"


def _complete(
    run: Run, place: Place, memory: Memory, device_rate: float | None, link_bytes_per_s: float | None = None
) -> Plan:
    """Measure this machine, and return the plan."""
    config, data = run.config, run.data
    volumes = _volumes(run)
    spare = None
    if place.is_here and (host_bytes := host_memory_bytes()) is not None:
        spare = host_bytes - (memory.total_bytes if place.is_host_memory else run.ring_bytes * place.num_sharing)
    flow = measure_flow(
        config,
        data.source,
        volumes[0][1] if volumes else None,
        spare_bytes=spare,
        link_bytes_per_s=link_bytes_per_s,
        wanted=None if device_rate is None else device_rate * place.devices_per_host,
    )
    height, width = (config.image_size,) * 2 if config.image_size else image_shape(data.source)
    each = f" ({config.batch // place.num_devices:,} on each device)" if place.num_devices > 1 else ""
    eval_images = _count_images(run)
    # Of snapshots by the clock, as many as are kept.
    is_by_clock = config.snapshot_every_steps is None and config.keep_snapshots > 0
    return Plan(
        subject=f"{run.model_name}, {quantity(run.num_params, 'parameter')}, batch {config.batch:,}{each} "
        f"of {height} × {width} px, {config.precision}",
        place=place,
        memory=memory,
        flow=flow,
        num_steps=max(config.steps - run.start.step, 0),
        train_images=config.step_ranges.image_at(config.steps) - config.step_ranges.image_at(run.start.step),
        stages=tuple(describe_stages(config)),
        num_evaluations=count_evaluations(run.start.step, config.steps, config.eval_every_steps or 0)
        * bool(eval_images),
        eval_images=eval_images,
        volumes=volumes,
        num_snapshots=count_snapshots(
            config.steps,
            every=1 if is_by_clock else config.snapshot_cadence,
            keep=config.keep_snapshots,
            keeps_best=config.keep_best is not None,
        ),
        snapshot_bytes=run.state_bytes,
        weights_bytes=4 * run.num_params,
        num_lines=config.steps,
        is_imagenet=config.synthetic,
    )


def _volumes(run: Run) -> list[tuple[str, Volume]]:
    """Return the sizes of the training split and of the evaluation split; none for batches of the user's own."""
    data = run.data
    if run.config.synthetic:
        size = data.source.height
        return [("train", imagenet_volume(size)), ("val", imagenet_volume(size, IMAGENET_VAL))]
    found = (data.source, data.evaluation)
    # A fold is a part of the training split.
    splits = {
        each.split: None for each in found if isinstance(each, ShardBatches | WindowedBatches | SequentialBatches)
    }
    return [(split.location.display.rstrip("/").rpartition("/")[2], split_volume(split)) for split in splits]


def _count_images(run: Run) -> int:
    evaluated = run.data.evaluation
    if isinstance(evaluated, SequentialBatches):
        return evaluated.num_images
    if isinstance(evaluated, BlackImages):
        return IMAGENET_VAL
    return 0 if evaluated is None else evaluated.num_batches * evaluated.batch


def _ignore(_: str) -> None:
    """Ignore a message."""


def stand_for_imagenet(
    config: TrainConfig, parts: UserParts, notify: Callable[[str], None]
) -> tuple[TrainConfig, UserParts]:
    """Return a run on synthetic batches as if they were ImageNet-1k; a run on other data is returned as it is.

    Its epochs and its default cadence of evaluations are those of ImageNet-1k, and it evaluates as many images, which
    are black.
    """
    if not config.synthetic:
        return config, parts
    if parts.evaluation is None and config.eval_split != "off":
        parts = replace(parts, evaluation=BlackImages(config))
    config = settle_epochs(config, IMAGENET_TRAIN, notify=notify)
    config = settle_evaluations(config, IMAGENET_TRAIN, is_evaluated=parts.evaluation is not None)
    if config.stages is not None:
        config = replace(config, stages=in_steps(config.stages))
    return TrainConfig.from_json(config.to_json() | {epochs: None for epochs, _ in COUNTED_IN_EPOCHS}), parts


class BlackImages:
    """An evaluation of as many black images as ImageNet-1k has for validation."""

    thread_safe = True

    def __init__(self, config: TrainConfig) -> None:
        self.batch = config.batch
        self.height = self.width = config.eval_image_size or config.image_size or SYNTHETIC_IMAGE_SIZE
        self.num_batches = -(-IMAGENET_VAL // config.batch)

    def fill(self, batch_index: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Write zeros."""
        pixels[...], labels[...] = 0, 0
