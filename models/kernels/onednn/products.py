"""Matrix products as operations of oneDNN."""

import math
from dataclasses import dataclass
from typing import ClassVar

from loopfeed.models.kernels.onednn.primitives import (
    Arg,
    Builder,
    DataType,
    Descriptor,
    Primitives,
    Tag,
    Value,
    operand,
    pieces,
    result,
)

# A task has at least so many multiplications, some tens of microseconds. It has the same matrices on any number of
# threads, so that each is computed by the same kernel.
_MULTIPLICATIONS_PER_TASK = 2**22


@dataclass(frozen=True)
class Product:
    """The product of two matrices, summed over one axis of each, as float32.

    Attributes:
        dtype: of the operands, "float32" or "bfloat16"; sums and the result are float32.
        x, y: shapes of the operands; the result has the other axis of `x`, then that of `y`.
        x_axis, y_axis: the axes that are summed over, of the same length.
    """

    kind: ClassVar[str] = "product"
    dtype: str
    x: tuple[int, ...]
    y: tuple[int, ...]
    x_axis: int
    y_axis: int

    def build(self, builder: Builder) -> Primitives:
        """Build the primitives: each task computes some rows."""
        rows, depth, columns = self.x[1 - self.x_axis], self.x[self.x_axis], self.y[1 - self.y_axis]
        strides = (self.x[1], 1) if self.x_axis else (1, self.x[1])
        dtype = DataType.of(self.dtype)
        y = Value(builder.describe((depth, columns), dtype, Tag.BA if self.y_axis else Tag.AB), operand(1))
        builder.multiply_by_rows(operand(0), (rows, depth), strides, dtype, y, columns)
        return builder.finish()


@dataclass(frozen=True)
class BatchedProduct:
    """The products of the matrices of two arrays, one after another, each summed over one axis of both.

    Attributes:
        dtype: of the operands, "float32" or "bfloat16".
        x, y: shapes of the operands `[M,·,·]`; the result `[M,·,·]` has the other axis of `x`, then that of `y`.
        x_axis, y_axis: the axes that are summed over, 1 or 2, of the same length.
        result_dtype: to which the float32 sums are rounded, "float32" or `dtype`.
    """

    kind: ClassVar[str] = "batched product"
    dtype: str
    x: tuple[int, ...]
    y: tuple[int, ...]
    x_axis: int
    y_axis: int
    result_dtype: str

    def build(self, builder: Builder) -> Primitives:
        """Build the primitives: each task computes the products of some of the matrices."""
        rows, columns = self.x[3 - self.x_axis], self.y[3 - self.y_axis]
        dtype, rounded = DataType.of(self.dtype), DataType.of(self.result_dtype)
        multiplications = math.prod(self.x) * columns
        parts = pieces(self.x[0], multiplications // _MULTIPLICATIONS_PER_TASK)
        # Along the matrices, then the rows and columns of each factor.
        of_x, of_y = math.prod(self.x[1:]), math.prod(self.y[1:])
        x_strides = (of_x, self.x[2], 1) if self.x_axis == 2 else (of_x, 1, self.x[2])
        y_strides = (of_y, self.y[2], 1) if self.y_axis == 1 else (of_y, 1, self.y[2])

        def describe(size: int) -> tuple[Descriptor, Descriptor, Descriptor]:
            return (
                builder.describe_strided((size, rows, self.x[self.x_axis]), dtype, x_strides),
                builder.describe_strided((size, self.y[self.y_axis], columns), dtype, y_strides),
                builder.describe_strided((size, rows, columns), rounded, (rows * columns, columns, 1)),
            )

        sized = builder.create_products(parts, describe)
        tasks = []
        for start, size in parts:
            primitive, (x, y, z) = sized[size]
            arguments: dict[int, Value] = {
                Arg.SOURCE: Value(x, operand(0).after(start * of_x * dtype.num_bytes)),
                Arg.WEIGHTS: Value(y, operand(1).after(start * of_y * dtype.num_bytes)),
                Arg.RESULT: Value(z, result(0).after(start * rows * columns * rounded.num_bytes)),
            }
            tasks.append(builder.task(primitive, arguments))
        builder.run(tasks)
        return builder.finish()
