"""The operations that programs call, each a value with a text from which it can be built again."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, ClassVar, Protocol

import jax

from loopfeed.models.kernels.onednn.convolutions import Convolution
from loopfeed.models.kernels.onednn.handler import call
from loopfeed.models.kernels.onednn.library import load_library
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


class Operation(Protocol):
    """A dataclass of numbers, strings and tuples that can build its primitives.

    Attributes:
        kind: the name of the class in texts.
    """

    kind: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def build(self, builder: Builder) -> Primitives:
        """Build the sequence of primitives."""

    def __hash__(self) -> int: ...


_REFERENCE = "ref"
_KINDS: dict[str, type[Any]] = {each.kind: each for each in (Convolution, Product, BatchedProduct)}


def text_of(operation: Operation) -> str:
    """Return the text of an operation, as in a program's custom calls."""
    return json.dumps({"kind": operation.kind, **asdict(operation)}, separators=(",", ":"))


def operation_of(text: str) -> Operation:
    """Return the operation of a text.

    Raises:
        ValueError: if its kind or a field is unknown, such as one of a later version.
    """
    fields = {name: _as_tuple(value) for name, value in json.loads(text).items()}
    try:
        operation: Operation = _KINDS[fields.pop("kind")](**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the program calls the kernel {text}, which this version does not have; compile it again"
        ) from error
    return operation


def _as_tuple(value: Any) -> Any:
    """Return a value with tuples for the lists of JSON, so that an operation equals the one that was written."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def prepare(text: str) -> Primitives:
    """Build the sequence of primitives of an operation from its text."""
    return build(operation_of(text))


@cache
def build(operation: Operation) -> Primitives:
    """Build the sequence of primitives of an operation, once per process; it takes some milliseconds.

    Raises:
        RuntimeError: if the library has no kernel for it, or only a wrong one.
    """
    library = load_library()
    with library.one_thread():
        return operation.build(Builder(library))


def has_fast_kernel(operation: Operation, among: str = "") -> bool:
    """Return whether the library has a right kernel for an operation, not only reference code; it is built for that.

    Args:
        operation: what is computed.
        among: a part of the names of the implementations that are fast for it.
    """
    try:
        names = build(operation).names
        return not any(name.startswith(_REFERENCE) for name in names) and any(among in name for name in names)
    except RuntimeError:
        return False


def call_operation(
    operation: Operation, results: Sequence[jax.ShapeDtypeStruct], *operands: jax.Array
) -> Sequence[jax.Array]:
    """Call an operation in the program that is being traced; see `handler.call`."""
    return call(prepare, text_of(operation), results, *operands)
