"""The report on a compiled program, as an object and as JSON."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loopfeed.engine.hlo.program import Array, HloProgram, Source
from loopfeed.engine.inspection.convolutions import TracedWork
from loopfeed.engine.inspection.findings import Finding
from loopfeed.engine.inspection.steps import CarryLeaf
from loopfeed.engine.inspection.work_by_scope import ScopeWork, total_of
from loopfeed.engine.sizing.device_rates import DeviceRates

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
