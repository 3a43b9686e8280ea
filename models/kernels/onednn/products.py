"""Matrix products as operations of oneDNN."""

from dataclasses import dataclass
from typing import ClassVar

from models.kernels.onednn.primitives import (
    NO_BIAS,
    TASKS_PER_THREAD,
    Arg,
    Builder,
    DataType,
    Descriptor,
    Primitive,
    Primitives,
    Query,
    Tag,
    Value,
    operand,
    pieces,
    result,
)

# The library sums in another order for a single row, which a large number of threads must not lead to.
_LEAST_ROWS = 16


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
        """Build the primitives: `y` is brought into the library's own layout, and each task computes some rows."""
        rows, depth, columns = self.x[1 - self.x_axis], self.x[self.x_axis], self.y[1 - self.y_axis]
        by_row, by_depth = (self.x[1], 1) if self.x_axis else (1, self.x[1])
        dtype = DataType.of(self.dtype)
        y = builder.describe((depth, columns), dtype, Tag.BA if self.y_axis else Tag.AB)
        parts = pieces(rows, min(TASKS_PER_THREAD * builder.library.num_threads, rows // _LEAST_ROWS))
        own: Value | None = None
        found: dict[int, tuple[Primitive, Descriptor, Descriptor]] = {}
        for size in sorted({size for _, size in parts}, reverse=True):
            x = builder.describe_strided((size, depth), dtype, (by_row, by_depth))
            z = builder.describe((size, columns), DataType.FLOAT32, Tag.AB)
            layout = builder.describe((depth, columns), dtype, Tag.ANY) if own is None else own.layout
            descriptor = builder.find("matmul", x, layout, NO_BIAS, z)
            own = own or builder.reordered(Value(y, operand(1)), builder.layout(descriptor, Query.WEIGHTS), [])
            found[size] = builder.create(descriptor), x, z
        tasks = []
        for start, size in parts:
            primitive, x, z = found[size]
            of_x = operand(0).after(start * by_row * dtype.num_bytes)
            of_z = result(0).after(start * columns * DataType.FLOAT32.num_bytes)
            arguments: dict[int, Value] = {Arg.SOURCE: Value(x, of_x), Arg.RESULT: Value(z, of_z)}
            tasks.append(builder.task(primitive, arguments | ({} if own is None else {Arg.WEIGHTS: own})))
        builder.run(tasks)
        return builder.finish()
