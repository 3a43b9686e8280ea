"""Operations, floating-point operations, bytes and least time of a compiled program, by phase, action and layer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from loopfeed.engine.hlo.program import HloProgram, Instruction, is_kernel, kernel_operation
from loopfeed.engine.hlo.work import bytes_of, flops_of, fused_into, products_of
from loopfeed.engine.inspection.steps import Kernel, Steps
from loopfeed.engine.scopes import ACTIONS, SNAPSHOT, Scope
from loopfeed.engine.sizing.device_rates import DeviceRates

ARITHMETIC, MEMORY = "arithmetic", "memory"
"""What bounds a kernel on the roofline."""
LOOPS, ONCE = "loops", "once"
"""The phases of rows that belong to neither training nor evaluation: in the loops, and outside of all."""
# The name of jax's convolution, of which XLA makes a product if its kernel is 1×1, and cuDNN's calls.
_PRIMITIVE = "conv_general_dilated"
# The files of loopfeed.models.layers in which convolutions are computed as products.
_CONVOLUTION = re.compile(r"models[/\\]layers[/\\](?:convolution|convolution_forms|grouped_forms)\.py$")


@dataclass(frozen=True)
class ScopeWork:
    """The work of a scope for one batch on one device.

    Attributes:
        phase: "train" or "valid"; `LOOPS` or `ONCE` for what belongs to neither.
        action: what is done, such as "forward"; empty for what has no action, such as the counting of loops.
        stage: the layers, such as "layer1"; empty outside of the model.
        num_kernels: kernels that run, those of inner loops as often as these turn.
        flops: floating-point operations.
        num_bytes: bytes read and written by the kernels, as if none came from a cache.
        seconds: the least time at the device's measured rates, None if they were not measured.
        bound: `ARITHMETIC` or `MEMORY`, what takes most of that time; empty if that is not known.
    """

    phase: str
    action: str
    stage: str
    num_kernels: int
    flops: int
    num_bytes: int
    seconds: float | None = None
    bound: str = ""

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0

    @property
    def name(self) -> str:
        """The scope in one word, such as "train/forward/layer1"."""
        return "/".join(filter(None, (self.phase, self.action, self.stage)))


def work_by_scope(
    steps: Steps, rates: DeviceRates | None, *, depth: int = 1, order: Sequence[Scope] = ()
) -> tuple[ScopeWork, ...]:
    """Return a row for each scope, in the order of the program.

    Args:
        steps: the program.
        rates: the device's rates; None leaves the times out.
        depth: how many levels of the model's layers to distinguish.
        order: the scopes in the order of the trace, which XLA's schedule does not keep.
    """
    traced: dict[tuple[str, str, str], int] = {}
    for place, scope in enumerate(order):
        traced.setdefault(_key_of_scope(scope, depth), place)
    rows: dict[tuple[str, str, str], list[Kernel]] = {}
    for kernel in steps.kernels:
        key = _key_of_scope(kernel.scope, depth) if kernel.is_looped else (ONCE, "", "")
        rows.setdefault(key, []).append(kernel)
    ordered = sorted(rows, key=lambda key: (*_rank(key), traced.get(key, len(order))))
    return tuple(_row(key, steps.program, rows[key], rates) for key in ordered)


def total_of(rows: Sequence[ScopeWork], phase: str) -> ScopeWork:
    """Return the sum of a phase's rows; snapshots, which are not part of a batch, are left out."""
    own = [row for row in rows if row.phase == phase and row.action != SNAPSHOT]
    seconds = [row.seconds for row in own if row.seconds is not None]
    by_bound = {bound: sum(row.seconds or 0.0 for row in own if row.bound == bound) for bound in (ARITHMETIC, MEMORY)}
    return ScopeWork(
        phase=phase,
        action="",
        stage="",
        num_kernels=sum(row.num_kernels for row in own),
        flops=sum(row.flops for row in own),
        num_bytes=sum(row.num_bytes for row in own),
        seconds=sum(seconds) if seconds else None,
        bound=max(by_bound, key=lambda bound: by_bound[bound]) if seconds else "",
    )


def convolution_flops(steps: Steps, phase: str) -> int:
    """Return the operations of a batch in the products of convolutions."""
    program = steps.program
    return sum(
        2 * kernel.times * products_of(program, each)
        for kernel in steps.kernels
        if kernel.scope.phase == phase
        for each in fused_into(program, kernel.instruction)
        if _is_convolution(program, each)
    )


def _is_convolution(program: HloProgram, instruction: Instruction) -> bool:
    """Return whether a product is a convolution, or part of one that `loopfeed.models.layers` computes as products."""
    if is_kernel(instruction):
        return kernel_operation(instruction).get("kind") == "convolution"
    if instruction.opcode == "convolution" or instruction.op_name.rpartition("/")[2] == _PRIMITIVE:
        return True
    return any(_CONVOLUTION.search(place.file) for place in program.call_stack(instruction))


def _key_of_scope(scope: Scope, depth: int) -> tuple[str, str, str]:
    if scope.phase is None:
        return LOOPS, "", ""
    return scope.phase, scope.action or "", "/".join(scope.path.split("/")[:depth])


def _rank(key: tuple[str, str, str]) -> tuple[int, int]:
    phase, action, _ = key
    phases = (*ACTIONS, LOOPS, ONCE)
    actions = ACTIONS.get(phase, ())
    return phases.index(phase), actions.index(action) if action in actions else len(actions)


def _row(
    key: tuple[str, str, str], program: HloProgram, kernels: Sequence[Kernel], rates: DeviceRates | None
) -> ScopeWork:
    phase, action, stage = key
    work = [(each.times, flops_of(program, each.instruction), bytes_of(program, each.instruction)) for each in kernels]
    seconds, bound = None, ""
    if rates is not None:
        by_bound = {ARITHMETIC: 0.0, MEMORY: 0.0}
        for times, flops, num_bytes in work:
            kind = ARITHMETIC if flops >= rates.ridge * num_bytes else MEMORY
            by_bound[kind] += times * rates.seconds(flops, num_bytes)
        seconds = sum(by_bound.values())
        bound = max(by_bound, key=lambda each: by_bound[each]) if seconds else ""
    return ScopeWork(
        phase=phase,
        action=action,
        stage=stage,
        num_kernels=sum(times for times, _, _ in work),
        flops=sum(times * flops for times, flops, _ in work),
        num_bytes=sum(times * num_bytes for times, _, num_bytes in work),
        seconds=seconds,
        bound=bound,
    )
