"""Explains the program of a run: opens the run as for a plan, compiles its program, and reads it. Runs nothing.

Scopes and source lines come from XLA's metadata, so a program from the cache must have been compiled from this very
code; the first report therefore compiles again what `train` has compiled.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.crossing.choice import this_device, this_platform
from loopfeed.engine.feed.batches import image_shape
from loopfeed.engine.hlo.text import parse_hlo
from loopfeed.engine.inspection.convolutions import trace_order, trace_work
from loopfeed.engine.inspection.report import LargeArray, ProgramReport, find_faults
from loopfeed.engine.inspection.steps import Steps, read_carry
from loopfeed.engine.inspection.work_by_scope import convolution_flops, work_by_scope
from loopfeed.engine.parts import PartArguments, UserParts, take_parts
from loopfeed.engine.program.kernels import kernels_on
from loopfeed.engine.run.compiling import DryRun, plan_program
from loopfeed.engine.run.run import Run
from loopfeed.engine.run.train import set_up_run
from loopfeed.engine.scopes import TRAIN
from loopfeed.engine.sizing.device_rates import DeviceRates, measure_device
from loopfeed.models.kernels import ONEDNN, XLA
from loopfeed.models.kernels.onednn.library import load_library
from loopfeed.models.registry import at_image_size, family_of, find_network

_MOST_ARRAYS = 100


def explain_program(
    config: TrainConfig,
    *,
    rates: DeviceRates | None = None,
    depth: int = 1,
    stage: int = 1,
    notify: Callable[[str], None] = lambda _: None,
    **parts: Unpack[PartArguments],
) -> ProgramReport:
    """Compile the program that `train` would run with these arguments, and report what is inside it.

    Nothing is run or written, except into the compilation cache.

    Args:
        config: the settings; `run_dir`, `resume` and `init_from` are ignored. For those of a run, see `run_settings`.
        model, batches, evaluation, loss, metrics, optimizer, schedule, augment: as for `train`.
        rates: the device's rates for the least times; None measures the device for about a second.
        depth: how many levels of the model's layers to distinguish.
        stage: the stage of a run with stages, from 1, whose steps are reported.
        notify: called with a line of text about what is done.

    Raises:
        ValueError: as `train` before its first step; or `depth` is below 1, or there is no such stage.

    Example:
        >>> rates = DeviceRates(flops_per_s=1e12, bytes_per_s=1e11, dtype="float32", device="an example")
        >>> explain_program(TrainConfig(data="data", batch=4), model=model, rates=rates).num_params  # 3 · 2 + 2
        8
    """
    return explain_parts(config, take_parts(parts), notify, rates=rates, depth=depth, stage=stage)


def explain_parts(
    config: TrainConfig,
    parts: UserParts,
    notify: Callable[[str], None],
    *,
    rates: DeviceRates | None = None,
    depth: int = 1,
    stage: int = 1,
) -> ProgramReport:
    """Return the report on a run with the user's own parts; see `explain_program`."""
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    num_stages = len(config.stages or (None,))
    if not 1 <= stage <= num_stages:
        raise ValueError(f"stage must lie in 1 … {num_stages}, the stages of the run, got {stage}: choose one of them")
    # A new run without a folder has the same program.
    config = replace(config, run_dir=None, resume=False, overwrite=False, init_from=None)
    with set_up_run(config, parts, notify, is_dry=True) as run:
        if config.stages is not None:
            run.keep_stage(stage - 1)
            notify(f"showing stage {stage} of {num_stages} (--stage)")
        planned = plan_program(run, is_explained=True)
    if rates is None:
        notify("measuring the device for a second")
        rates = measure_this_device(planned.run.config)
    return _report(planned, rates, depth)


def measure_this_device(config: TrainConfig) -> DeviceRates:
    """Return the rates of the device that a run with these settled settings would train on."""
    platform = this_platform()
    if kernels_on(config, platform) == ONEDNN and load_library().supports(config.precision):
        return measure_device(this_device(), config.precision, kernels=ONEDNN)
    # XLA's products of bfloat16 operands are mostly float32 on a CPU.
    return measure_device(this_device(), "float32" if platform == "cpu" else config.precision, kernels=XLA)


def _report(planned: DryRun, rates: DeviceRates, depth: int) -> ProgramReport:
    compiled, run, platform = planned.compiled, planned.run, this_platform()
    program = parse_hlo(compiled.call.as_text() or "")
    steps = Steps(program)
    traced = trace_work(planned.in_all_forms, platform, kernels_on(run.config, platform))
    carry = read_carry(program)
    return ProgramReport(
        model=run.model_name,
        device=str(this_device().device_kind),
        platform=platform,
        num_devices=len(run.team.devices),
        batch=run.stages[0].num_rows,
        image_size=_image_size(run),
        num_params=run.num_params,
        settings=run.config.to_json(),
        rates=rates,
        scopes=work_by_scope(steps, rates, depth=depth, order=trace_order(planned.traced.jaxpr)),
        traced=traced,
        known_products=_known_products(run),
        convolution_flops=convolution_flops(steps, TRAIN),
        memory_bytes=compiled.memory_bytes,
        arrays=tuple(
            LargeArray(array, array.num_bytes, steps.name_of(each), steps.source_of(each))
            for array, each in steps.largest_arrays(TRAIN)[:_MOST_ARRAYS]
        ),
        carry=carry,
        findings=find_faults(steps, traced.convolutions, carry, is_cpu=platform == "cpu"),
        num_instructions=len(program.instructions),
        trace_s=compiled.trace_s,
        compile_s=compiled.compile_s,
        from_cache=compiled.from_cache,
        program=program,
        lowered=planned.traced.lowered,
    )


def _image_size(run: Run) -> tuple[int, int]:
    config, source = run.config, run.data.source
    if (size := run.stages[0].settings.augmentation.resized_to) is not None:
        return size, size
    return (config.image_size,) * 2 if config.image_size else image_shape(source)


def _known_products(run: Run) -> int | None:
    """Return the multiply-accumulates of one image that the description of a model of the registry has."""
    name, num_classes = run.registry_name, run.data.num_classes
    height, width = _image_size(run)
    if name is None or num_classes is None or height != width:
        return None
    net = at_image_size(find_network(name), height)
    return int(family_of(net).count_products(net, height, num_classes))
