"""The graph of an ONNX file while it is written: its nodes, its constants, and the values that are broadcast late.

Owns names, shapes and dtypes. Must not know which operation becomes which node.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from loopfeed.engine.export.flat_jaxpr import Value

_HALVES = ("bfloat16", "float16")
_LONGEST_INT = 1 << 62
BATCH: Final = "batch"
"""The name of the images' first axis, whose size is not fixed."""


class UnsupportedError(ValueError):
    """Error raised for an operation that has no form in ONNX here."""


class OnnxGraph:
    """Nodes and constants of a graph whose values are those of a flat jaxpr.

    A value whose result is only repeated along an axis is kept with size 1 there: ONNX's elementwise operators repeat
    it themselves. `read` writes the whole of it for others.

    Args:
        images: the only input, named `images`.

    Attributes:
        nodes, constants: what the file holds.
    """

    def __init__(self, images: Value) -> None:
        from onnx import NodeProto, TensorProto

        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self._names: dict[int, str] = {id(images): "images"}
        self._shapes: dict[int, tuple[Any, ...]] = {}
        self._kept = [images]  # so that no other value has its id
        self._constant_names: dict[tuple[Any, ...], str] = {}
        self._batch = images.shape[0]

    def add(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node with one output, and return the output's name."""
        from onnx import helper

        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, array: Any) -> str:
        """Return the name of a constant; equal ones are stored once."""
        from onnx import numpy_helper

        array = np.asarray(array)
        array = array.astype(np.float32) if str(array.dtype) in _HALVES else np.asarray(array, order="C")
        key = (str(array.dtype), array.shape, hashlib.sha256(array.data).digest())
        if key not in self._constant_names:
            name = self._constant_names[key] = f"constant_{len(self.constants)}"
            self.constants.append(numpy_helper.from_array(array, name))
        return self._constant_names[key]

    def ints(self, *numbers: Any) -> str:
        """Return the name of a constant vector of int64."""
        return self.constant(np.array(numbers, np.int64))

    def name(self, value: Value) -> str:
        """Return the name of a value for an operator that repeats operands along axes of size 1."""
        if value.constant is not None:
            return self.constant(value.constant)
        return self._names[id(value)]

    def read(self, value: Value) -> str:
        """Return the name of a value with its whole shape."""
        name, stored = self.name(value), self.stored_shape(value)
        if stored == value.shape:
            return name
        self._shapes.pop(id(value))
        self._names[id(value)] = name = self.add("Expand", [name, self._sizes(value.shape)])
        return name

    def put(self, value: Value, name: str, stored: tuple[Any, ...] | None = None) -> None:
        """Say which output a value is, and the shape that it has there, if that is not its whole shape."""
        self._kept.append(value)
        self._names[id(value)] = name
        if stored is not None and stored != value.shape:
            self._shapes[id(value)] = stored

    def stored_shape(self, value: Value) -> tuple[Any, ...]:
        """Return the shape of the output that a value is, with sizes of 1 where it is not repeated yet."""
        return self._shapes.get(id(value), value.shape)

    def reshape(self, name: str, shape: Sequence[Any]) -> str:
        """Reshape; one of the sizes may depend on the batch."""
        return self.add("Reshape", [name, self.ints(*self.plain_sizes(shape))])

    def plain_sizes(self, shape: Sequence[Any]) -> list[int]:
        """Return sizes with -1 for the one that depends on the batch; raise UnsupportedError if there are several."""
        sizes = [size if isinstance(size, int) else -1 for size in shape]
        if sizes.count(-1) > 1:
            raise UnsupportedError(f"a shape with two sizes that depend on the batch, {list(shape)}")
        return sizes

    def slice(self, name: str, shape: Sequence[Any], start: Sequence[Any], stop: Sequence[Any], step: Any) -> str:
        """Cut a part of a value of this shape."""
        steps = step or (1,) * len(shape)
        axes = [
            axis
            for axis, size in enumerate(shape)
            if not (isinstance(start[axis], int) and start[axis] == 0 and stop[axis] == size and steps[axis] == 1)
        ]
        if not axes:
            return name
        for axis in axes:
            if not isinstance(start[axis], int) or not isinstance(stop[axis], int):
                raise UnsupportedError("a slice that depends on the batch")
        numbers = ([each[axis] for axis in axes] for each in (start, stop))
        return self.add(
            "Slice",
            [name, *(self.ints(*each) for each in numbers), self.ints(*axes), self.ints(*(steps[a] for a in axes))],
        )

    def transpose(self, name: str, order: Sequence[int]) -> str:
        """Reorder axes; nothing is added if they keep their order."""
        return name if list(order) == sorted(order) else self.add("Transpose", [name], perm=list(order))

    def _sizes(self, shape: Sequence[Any]) -> str:
        """Return the name of a vector of sizes, some of which are multiples of the batch."""
        if all(isinstance(size, int) for size in shape):
            return self.ints(*shape)
        batch = self.add("Shape", ["images"], start=0, end=1)
        parts = []
        for size in shape:
            if isinstance(size, int):
                parts.append(self.ints(size))
                continue
            factor = next((k for k in range(1, 1 << 12) if size == k * self._batch), None)
            if factor is None:
                raise UnsupportedError(f"the size {size}")
            parts.append(batch if factor == 1 else self.add("Mul", [batch, self.ints(factor)]))
        return self.add("Concat", parts, axis=0)
