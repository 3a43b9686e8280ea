"""The three parts of a convolution as operations of oneDNN."""

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar

from loopfeed.models.kernels.onednn.primitives import (
    NO_BIAS,
    TASKS_PER_THREAD,
    Arg,
    Builder,
    DataType,
    Descriptor,
    Parts,
    Place,
    Primitives,
    Query,
    Tag,
    Value,
    operand,
    pieces,
    result,
    sizes,
)

_TRAINING = 64
_DIRECT = 1
_UNDILATED = (0, 0)
# A kernel of so many elements is brought into another layout by several tasks, each with so many output channels, a
# multiple of the blocks of 16, 32, 48 and 64 in all layouts.
_LARGE_KERNEL = 2**15
_CHANNEL_BLOCK = 192
# A filter gradient is the sum of the sums of so many tasks, whatever the number of threads, so that the result is the
# same on any number of them. Each sum is one more array to write and to read, which takes a tenth of the time of its
# products if these are over so many positions. Sums over a single image are slow: with eight images of 56 px, four
# tasks of two took 0.86 to 0.93 of the time of eight.
_POSITIONS_PER_SUM = 1024
_IMAGES_PER_SUM = 2
_MOST_SUMS = 16
# A row of a tile of AMX holds so many bfloat16 numbers.
_TILE_CHANNELS = 32


class Part(StrEnum):
    """The parts of a convolution."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input gradient"
    FILTER_GRADIENT = "filter gradient"
    FILTER_GRADIENT_BY_PRODUCT = "filter gradient by product"


def padding_of_product(
    x: tuple[int, ...], y: tuple[int, ...], strides: tuple[int, ...], padding: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the padding that the input of a filter gradient by product must have.

    That of the convolution, up to whole strides: oneDNN has no layout in which the last stride of an image's rows
    reaches into the next image.

    Args:
        x, y: shapes of the input, without padding, and of the output.
        strides, padding: of the convolution.
    """
    (top, bottom), (left, right) = padding
    down, across = strides[0] * y[1] - top - x[1], strides[1] * y[2] - left - x[2]
    return (top, max(bottom, down)), (left, max(right, across))


@dataclass(frozen=True)
class Convolution:
    """One part of a convolution with NHWC and HWIO layouts.

    Operands are `x [B,H,W,C]` and `kernel [kh,kw,C/groups,K]` (forward), `gradient [B,P,Q,K]` and `kernel` (input
    gradient), or `x` and `gradient` (filter gradient). All are of `dtype`, and so is the result, except that a filter
    gradient by product is float32; sums are float32.

    Attributes:
        part: which part, a `Part`.
        dtype: "float32" or "bfloat16".
        x, kernel, y: shapes of input, kernel and output.
        strides: of the window, (height, width).
        padding: ((top, bottom), (left, right)); for a filter gradient by product, `x` has it already.
    """

    kind: ClassVar[str] = "convolution"
    part: str
    dtype: str
    x: tuple[int, ...]
    kernel: tuple[int, ...]
    y: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, ...], ...]

    def build(self, builder: Builder) -> Primitives:
        """Build the primitives: kernels are brought into the library's own layout, and their gradients out of it.

        Raises:
            RuntimeError: if the library has no kernel for it, or only a wrong one.
        """
        if self.is_wrong_in_library():
            raise RuntimeError(f"oneDNN computes this wrong in bfloat16; use XLA's form: {self}")
        plain = builder.describe(self._kernel_sizes(), self._data_type, self._kernel_tag())
        if self.part == Part.FILTER_GRADIENT_BY_PRODUCT:
            self._build_product(builder)
        elif self.part == Part.FILTER_GRADIENT:
            self._build_filter_gradient(builder, Value(plain, result(0)))
        else:
            self._build_images(builder, Value(plain, operand(1)))
        return builder.finish()

    def is_wrong_in_library(self) -> bool:
        """Return whether the library's kernel for bfloat16 is wrong for this operation; those for float32 are right.

        These rules cover what was wrong when random convolutions, between canaries, were compared with float64:

        - Filter gradients (`brgconv_bwd_w`, `jit_bf16`): in images narrower than the stride, a column of the kernel may
          meet nothing but padding. Its gradient stays whatever the memory held before.
        - Forward (`brgconv:avx512_core_bf16`, with AMX too): where as many columns on the right are never read as there
          is padding on the left, from three on, results are wrong, and the memory behind them is overwritten.
        - Forward (`brgconv:avx512_core_amx`): with a stride larger than a kernel of several rows, or than one row with
          padding, the library asks for too small a scratchpad, and overwrites those of other tasks.
        - Forward (the same): where the width of the kernel and the stride have a common factor, several columns become
          channels, to fill a row of a tile. If they fill more than one row, results are wrong.
        """
        if self.dtype != "bfloat16":
            return False
        W, Q, (kh, kw), left = self.x[2], self.y[2], self.kernel[:2], self.padding[1][0]
        down, across = self.strides
        if self.part == Part.FILTER_GRADIENT:
            return across > W
        is_plain = (kh, kw) == (1, 1) and not any(map(any, self.padding))
        leaves_columns = left > 0 and W + left > kw + (Q - 1) * across
        skips_pixels = down > kh or across > kw
        return self.part == Part.FORWARD and not is_plain and (leaves_columns or skips_pixels or self._joins_columns())

    def _joins_columns(self) -> bool:
        """Return whether so many columns may become channels that these fill several rows of a tile."""
        C, factor = self.kernel[2], math.gcd(self.kernel[1], self.strides[1])
        joined = (C * columns for columns in range(2, factor + 1) if factor % columns == 0)
        return C % _TILE_CHANNELS > 0 and any(size > _TILE_CHANNELS and size % _TILE_CHANNELS == 0 for size in joined)

    def _build_images(self, builder: Builder, kernel: Value) -> None:
        """Build the forward pass or the input gradient: each task computes some of the images."""
        free = builder.describe(self._kernel_sizes(), self._data_type, Tag.ANY)
        parts = pieces(self.x[0], TASKS_PER_THREAD * builder.library.num_threads)
        sized, layout = builder.create_for_each_size(parts, partial(self._find, builder), free, Query.WEIGHTS)
        own = builder.reordered(kernel, layout, self._kernel_parts())
        is_forward = self.part == Part.FORWARD
        tasks = []
        for start, size in parts:
            primitive, (x, y) = sized[size]
            of_x = (operand(0) if is_forward else result(0)).after(start * self._image_bytes(self.x))
            of_y = (result(0) if is_forward else operand(0)).after(start * self._image_bytes(self.y))
            image: dict[int, Value] = {Arg.SOURCE if is_forward else Arg.SOURCE_GRADIENT: Value(x, of_x)}
            image[Arg.RESULT if is_forward else Arg.RESULT_GRADIENT] = Value(y, of_y)
            tasks.append(builder.task(primitive, {Arg.WEIGHTS: own, **image}))
        builder.run(tasks)

    def _build_filter_gradient(self, builder: Builder, gradient: Value) -> None:
        """Build the filter gradient: each task sums over some of the images, and then their sums are added."""
        most = min(math.prod(self.y[:3]) // _POSITIONS_PER_SUM, self.x[0] // _IMAGES_PER_SUM, _MOST_SUMS)
        parts = pieces(self.x[0], max(2, most))
        # Sums of several tasks are added before they are rounded.
        dtype = self._data_type if len(parts) == 1 else DataType.FLOAT32
        free = builder.describe(self._kernel_sizes(), dtype, Tag.ANY)
        sized, own = builder.create_for_each_size(parts, partial(self._find, builder), free, Query.WEIGHTS_GRADIENT)
        sums = [builder.reserve(own) for _ in parts]
        tasks = []
        for (start, size), total in zip(parts, sums, strict=True):
            primitive, (x, y) = sized[size]
            of_x = Value(x, operand(0).after(start * self._image_bytes(self.x)))
            of_y = Value(y, operand(1).after(start * self._image_bytes(self.y)))
            tasks.append(
                builder.task(primitive, {Arg.SOURCE: of_x, Arg.RESULT_GRADIENT: of_y, Arg.WEIGHTS_GRADIENT: total})
            )
        builder.run(tasks)
        if len(sums) > 1:
            builder.add(sums, sums[0], builder.library.num_threads)
        builder.reorder(sums[0], gradient, self._kernel_parts())

    def _build_product(self, builder: Builder) -> None:
        """Build the float32 filter gradient as one product, summed over positions, of patches and gradient."""
        patches, row = self._patches(builder), math.prod(self.kernel[:3])
        positions, K = math.prod(self.y[:3]), self.y[3]
        gradient = Value(builder.describe((positions, K), self._data_type, Tag.AB), operand(1))
        builder.multiply_by_rows(patches, (row, positions), (1, row), self._data_type, gradient, K)

    def _patches(self, builder: Builder) -> Place:
        """Append a phase that copies the receptive fields, `[B,P,Q,kh,kw,C]`, and return where they lie."""
        (B, H, W, C), (_, P, Q, _), (kh, kw) = self.x, self.y, self.kernel[:2]
        (sh, sw), row, size = self.strides, kh * kw * C, self._data_type.num_bytes
        if row == C and (H, W) == (P, Q):
            return operand(0)
        place = builder.reserve(builder.describe((B * P * Q, row), self._data_type, Tag.AB)).place
        shape = (B, P, Q, C)
        met = builder.describe_strided(shape, self._data_type, (H * W * C, sh * W * C, sw * C, 1))
        kept = builder.describe_strided(shape, self._data_type, (P * Q * row, Q * row, row, 1))
        copies = []
        for tap in range(kh * kw):
            source = operand(0).after((tap // kw * W + tap % kw) * C * size)
            copies.append(builder.copy(Value(met, source), Value(kept, place.after(tap * C * size))))
        builder.run(copies)
        return place

    def _find(self, builder: Builder, num_images: int, kernel: Descriptor) -> tuple[Any, tuple[Descriptor, ...]]:
        """Return the descriptor of the primitive for so many images, and the layouts of their input and output.

        `kernel` is the layout of the kernel or its gradient.
        """
        window, dtype = self._window(), self._data_type
        shapes = ((num_images, shape[3], shape[1], shape[2]) for shape in (self.x, self.y))
        x, y = layouts = tuple(builder.describe(shape, dtype, Tag.NHWC) for shape in shapes)
        # The hint describes the forward pass, whose kernel is of the operands' element type.
        hint_kernel = builder.describe(self._kernel_sizes(), dtype, Tag.ANY)
        forward_kernel = kernel if self.part == Part.FORWARD else hint_kernel
        forward = builder.find("convolution_forward", _TRAINING, _DIRECT, x, forward_kernel, NO_BIAS, y, *window)
        if self.part == Part.FORWARD:
            return forward, layouts
        if self.part == Part.INPUT_GRADIENT:
            return builder.find("convolution_backward_data", _DIRECT, x, kernel, y, *window, forward), layouts
        return builder.find("convolution_backward_weights", _DIRECT, x, kernel, NO_BIAS, y, *window, forward), layouts

    @property
    def _data_type(self) -> DataType:
        return DataType.of(self.dtype)

    def _image_bytes(self, shape: tuple[int, ...]) -> int:
        return self._data_type.num_bytes * math.prod(shape[1:])

    def _window(self) -> tuple[Any, ...]:
        (top, bottom), (left, right) = self.padding
        return sizes(self.strides), sizes(_UNDILATED), sizes((top, left)), sizes((bottom, right))

    def _kernel_sizes(self) -> tuple[int, ...]:
        height, width, C, K = self.kernel
        groups = self.x[3] // C
        return (K, C, height, width) if groups == 1 else (groups, K // groups, C, height, width)

    def _kernel_parts(self) -> Parts:
        """Return the parts of a large kernel that tasks bring into another layout: some of its output channels."""
        K, *others = self._kernel_sizes()
        if len(others) > 3 or math.prod(self.kernel) < _LARGE_KERNEL:
            return []
        starts = range(0, K, _CHANNEL_BLOCK)
        return [((start, 0, 0, 0), (min(_CHANNEL_BLOCK, K - start), *others)) for start in starts]

    def _kernel_tag(self) -> Tag:
        return Tag.HWIO if self.x[3] == self.kernel[2] else Tag.HWIGO
