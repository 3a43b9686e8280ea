"""The three parts of a convolution as operations of oneDNN."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from models.kernels.onednn.primitives import Arg, Builder, DataType, Place, Query, Sequenced, Tag, sizes

_TRAINING = 64
_DIRECT = 1
_NO_BIAS = None
_UNDILATED = (0, 0)


class Part(StrEnum):
    """The parts of a convolution."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input gradient"
    FILTER_GRADIENT = "filter gradient"


@dataclass(frozen=True)
class Convolution:
    """One part of a convolution with NHWC and HWIO layouts.

    Operands are `x [B,H,W,C]` and `kernel [kh,kw,C/groups,K]` (forward), `gradient [B,P,Q,K]` and `kernel` (input
    gradient), or `x` and `gradient` (filter gradient). All are of `dtype`, and so is the result; sums are float32.

    Attributes:
        part: which part, a `Part`.
        dtype: "float32" or "bfloat16".
        x, kernel, y: shapes of input, kernel and output.
        strides: of the window, (height, width).
        padding: ((top, bottom), (left, right)).
    """

    kind: ClassVar[str] = "convolution"
    part: str
    dtype: str
    x: tuple[int, ...]
    kernel: tuple[int, ...]
    y: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, ...], ...]

    def build(self, builder: Builder) -> Sequenced:
        """Build the primitives: kernels are brought into the library's own layout, and their gradients out of it."""
        dtype = DataType[self.dtype.upper()]
        x, y = (builder.describe(_channels_first(shape), dtype, Tag.NHWC) for shape in (self.x, self.y))
        plain, free = (builder.describe(self._kernel_sizes(), dtype, tag) for tag in (self._kernel_tag(), Tag.ANY))
        window = self._window()
        forward = builder.primitive("convolution_forward", _TRAINING, _DIRECT, x, free, _NO_BIAS, y, *window)
        first, second, result = Place("operand", 0), Place("operand", 1), Place("result", 0)
        if self.part == Part.FORWARD:
            kernel = builder.reordered((plain, second), builder.layout(forward, Query.WEIGHTS))
            builder.run(forward, {Arg.SOURCE: (x, first), Arg.WEIGHTS: kernel, Arg.RESULT: (y, result)})
        elif self.part == Part.INPUT_GRADIENT:
            backward = builder.primitive("convolution_backward_data", _DIRECT, x, free, y, *window, forward)
            kernel = builder.reordered((plain, second), builder.layout(backward, Query.WEIGHTS))
            arguments = {Arg.SOURCE_GRADIENT: (x, result), Arg.WEIGHTS: kernel, Arg.RESULT_GRADIENT: (y, first)}
            builder.run(backward, arguments)
        else:
            backward = builder.primitive(
                "convolution_backward_weights", _DIRECT, x, free, _NO_BIAS, y, *window, forward
            )
            own = builder.layout(backward, Query.WEIGHTS_GRADIENT)
            gradient = (plain, result) if builder.equal(own, plain) else (own, builder.in_arena(own))
            arguments = {Arg.SOURCE: (x, first), Arg.RESULT_GRADIENT: (y, second), Arg.WEIGHTS_GRADIENT: gradient}
            builder.run(backward, arguments)
            if gradient[1] != result:
                builder.reorder(gradient, (plain, result))
        return builder.finish()

    def _window(self) -> tuple[Any, ...]:
        (top, bottom), (left, right) = self.padding
        return sizes(self.strides), sizes(_UNDILATED), sizes((top, left)), sizes((bottom, right))

    def _kernel_sizes(self) -> tuple[int, ...]:
        height, width, C, K = self.kernel
        groups = self.x[3] // C
        return (K, C, height, width) if groups == 1 else (groups, K // groups, C, height, width)

    def _kernel_tag(self) -> Tag:
        return Tag.HWIO if self.x[3] == self.kernel[2] else Tag.HWIGO


def _channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    B, H, W, C = shape
    return B, C, H, W
