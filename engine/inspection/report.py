"""The report on a compiled program, as an object and as JSON, and what in it is slower than it has to be, by name."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loopfeed.engine.hlo.program import HOST_SPACE, Array, HloProgram, Instruction, Source
from loopfeed.engine.hlo.work import bytes_of, fused_into, naive_reason
from loopfeed.engine.inspection.convolutions import Convolution, TracedWork
from loopfeed.engine.inspection.steps import CarryLeaf, Kernel, Steps
from loopfeed.engine.inspection.work_by_scope import ScopeWork, total_of
from loopfeed.engine.scopes import FORWARD, SNAPSHOT, TRAIN
from loopfeed.engine.sizing.device_rates import DeviceRates

_MESSAGES = {
    "lax-convolution": "a convolution is jax.lax.conv_general_dilated, whose gradients are many times slower in a loop "
    "on a CPU: use loopfeed.convolution, loopfeed.conv_general_dilated or an adapter of loopfeed.engine.adapters",
    "naive-convolution": "a convolution runs as a naive loop nest on a CPU, because {}",
    "naive-product": "a product runs as a naive loop nest on a CPU, because {}",
    "float64": "float64 is computed, which is half as fast as float32 or slower: convert the operand that is float64",
    "host-copy": "an array is copied between the memory of the host and of the device in the loop",
    "not-donated": "a leaf of the state does not give its memory to the result, so that both exist",
    "large-move": "a {} moves much memory and computes nothing",
    "large-constant": "a large constant is part of the program, which makes it slow to compile: compute it, or make it "
    "a parameter",
}
# A constant, copy or transpose of at least so many bytes is named, a copy only if it is this part of a batch's bytes.
_LARGE_BYTES, _LEAST_SHARE = 1 << 20, 0.01
_WIDE = ("f64", "c128")
# The kind of a fusion that a library computes, whose products are fast whatever their form.
_LIBRARY = "kCustom"
_MOVES = frozenset({"copy", "transpose", "copy-start"})
# What a fusion may contain, beside a copy or transpose, and still compute nothing.
_NOTHING = frozenset({"parameter", "constant", "bitcast", "reshape", "broadcast", "convert", "tuple", "slice"})


@dataclass(frozen=True)
class Finding:
    """Something that makes a program slower or larger than it has to be.

    Attributes:
        kind: a word for it, such as "lax-convolution".
        message: what it is, and what to do.
        scope: where it is in the model, or the name of what it is about.
        source: the line of code that it comes from, None if XLA added it.
        num_bytes: its size, 0 if that does not matter.
    """

    kind: str
    message: str
    scope: str
    source: Source | None = None
    num_bytes: int = 0


def find_faults(
    steps: Steps, convolutions: tuple[Convolution, ...], carry: tuple[CarryLeaf, ...], *, is_cpu: bool
) -> tuple[Finding, ...]:
    """Return what is suboptimal in a program.

    Args:
        steps: the program.
        convolutions: its convolutions.
        carry: its carry.
        is_cpu: whether it runs on a CPU.
    """
    kept = [_finding("not-donated", leaf.name, num_bytes=leaf.num_bytes) for leaf in carry if not leaf.is_donated]
    found = [*_wide(steps), *_to_host(steps), *kept, *_moved(steps), *_constants(steps)]
    if is_cpu:
        found = [*_lax(convolutions), *_naive(steps), *found]
    return tuple(found)


def _finding(kind: str, scope: str, source: Source | None = None, num_bytes: int = 0, what: str = "") -> Finding:
    return Finding(kind, _MESSAGES[kind].format(what), scope, source, num_bytes)


def _lax(convolutions: tuple[Convolution, ...]) -> Iterator[Finding]:
    for each in convolutions:
        if each.is_lax:
            yield _finding("lax-convolution", "/".join(filter(None, (TRAIN, FORWARD, each.scope))), each.source)


def _naive(steps: Steps) -> Iterator[Finding]:
    for kernel, each in _looped(steps):
        if kernel.instruction.attribute("kind") == _LIBRARY:
            continue
        if (reason := naive_reason(steps.program, each)) is not None:
            kind = "naive-convolution" if each.opcode == "convolution" else "naive-product"
            scope = steps.name_of(each if each.op_name else kernel.instruction)
            yield _finding(kind, scope, steps.source_of(each), what=reason)


def _wide(steps: Steps) -> Iterator[Finding]:
    wide = (pair for pair in _looped(steps) if any(array.dtype in _WIDE for array in pair[1].results))
    places = dict.fromkeys((steps.name_of(kernel.instruction), steps.source_of(each)) for kernel, each in wide)
    yield from (_finding("float64", *place) for place in places)


def _to_host(steps: Steps) -> Iterator[Finding]:
    for kernel in steps.kernels:
        each = kernel.instruction
        if not kernel.is_looped or not each.opcode.startswith("copy"):
            continue
        arrays = [array for operand in (*steps.program.operands_of(each), each) for array in operand.results]
        if any(array.space == HOST_SPACE for array in arrays):
            yield _finding("host-copy", steps.name_of(each), steps.source_of(each), each.results[0].num_bytes)


def _moved(steps: Steps) -> Iterator[Finding]:
    """Yield the large copies and transposes of a batch, the largest first; those of snapshots are left out."""
    least, found = max(_LARGE_BYTES, _LEAST_SHARE * steps.batch_bytes), []
    for kernel in steps.kernels:
        each = kernel.instruction
        if not kernel.is_looped or kernel.scope.action == SNAPSHOT:
            continue
        opcodes = {inner.opcode for inner in fused_into(steps.program, each)}
        moves = opcodes & _MOVES
        num_bytes = kernel.times * bytes_of(steps.program, each)
        if moves and not opcodes - moves - _NOTHING and num_bytes >= least:
            what = f"{'transpose' if 'transpose' in moves else 'copy'} of {', '.join(map(str, each.results[:1]))}"
            found.append(_finding("large-move", steps.name_of(each), steps.source_of(each), num_bytes, what))
    yield from sorted(found, key=lambda finding: -finding.num_bytes)


def _constants(steps: Steps) -> Iterator[Finding]:
    for each in steps.program.instructions.values():
        if each.opcode == "constant" and each.num_bytes > _LARGE_BYTES:
            user = next(iter(steps.program.users_of(each)), each)
            yield _finding("large-constant", steps.name_of(user), steps.source_of(user), each.num_bytes)


def _looped(steps: Steps) -> Iterator[tuple[Kernel, Instruction]]:
    """Yield the kernels in the loops, each with every instruction that runs in it."""
    for kernel in steps.kernels:
        if kernel.is_looped:
            for each in fused_into(steps.program, kernel.instruction):
                yield kernel, each


# What `to_json` leaves out: programs.
_NOT_IN_JSON = ("program", "lowered")


class LargeArray(NamedTuple):
    """An array that a training batch computes: its size in bytes, the scope that computes it, and the line of code."""

    array: Array
    num_bytes: int
    made_by: str
    source: Source | None


@dataclass(frozen=True)
class ProgramReport:
    """The inside of a run's compiled program. Counts are for one batch on one device.

    Attributes:
        model: the name of the model.
        device: the vendor's name for the device.
        platform: "cpu", "cuda", "rocm" or "tpu".
        num_devices: number of devices that train together.
        batch: images of a batch on one device.
        image_size: height and width of the images in pixels.
        num_params: number of learnable parameters.
        settings: every setting, as `TrainConfig.to_json`.
        rates: the device's measured rates, None if they were not measured.
        scopes: the work by phase, action and layer.
        traced: the convolutions and the products of the forward pass, before XLA rewrote them.
        known_products: multiply-accumulates of one image that the model's description has, None for a user's own.
        convolution_flops: floating-point operations of a training batch in convolutions, forward and backward, as
            compiled.
        memory_bytes: XLA's analysis of the program's memory by kind, in bytes.
        arrays: the largest arrays that a training batch computes, at most 100, the largest first.
        carry: the leaves of the training state that the loops carry.
        findings: what is slower than it has to be.
        num_instructions: number of instructions of the program.
        trace_s, compile_s: seconds that tracing and compiling took.
        from_cache: whether the program was loaded from the cache.
        program: the optimised program.
        lowered: jax's lowered stage of it, in StableHLO.
    """

    model: str
    device: str
    platform: str
    num_devices: int
    batch: int
    image_size: tuple[int, int]
    num_params: int
    settings: Mapping[str, Any]
    rates: DeviceRates | None
    scopes: tuple[ScopeWork, ...]
    traced: TracedWork
    known_products: int | None
    convolution_flops: int
    memory_bytes: Mapping[str, int]
    arrays: tuple[LargeArray, ...]
    carry: tuple[CarryLeaf, ...]
    findings: tuple[Finding, ...]
    num_instructions: int
    trace_s: float
    compile_s: float
    from_cache: bool
    program: HloProgram = field(repr=False)
    lowered: Any = field(repr=False)

    @property
    def forward_products(self) -> float:
        """Multiply-accumulates of the forward pass of one image."""
        return self.traced.forward_products / self.batch

    @property
    def convolution_share(self) -> float:
        """The part of the floating-point operations of a training batch that convolutions take, 0 … 1."""
        flops = self.total("train").flops
        return self.convolution_flops / flops if flops else 0.0

    def total(self, phase: str) -> ScopeWork:
        """Return the work of a batch of a phase, "train" or "valid"; snapshots are left out."""
        return total_of(self.scopes, phase)

    def to_json(self) -> dict[str, Any]:
        """Return the report as values that JSON has; arrays are written as "f32[64,10]", lines as "file:line"."""
        names = [each.name for each in dataclasses.fields(self) if each.name not in _NOT_IN_JSON]
        return {name: _plain(getattr(self, name)) for name in names} | {
            "forward_products": self.forward_products,
            "convolution_share": self.convolution_share,
            "totals": {phase: _plain(self.total(phase)) for phase in ("train", "valid")},
        }


def _plain(value: Any) -> Any:
    if isinstance(value, Array):
        return str(value)
    if isinstance(value, Source):
        return f"{value.file}:{value.line}"
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
