"""Sequences of oneDNN's primitives, which run on addresses that are given at each call.

Arrays that cross are dense and in the order of their axes; between the primitives of one sequence a value may have any
layout that the library prefers, and lies in an arena, as all scratchpads do. Every primitive runs on one thread. A
sequence is a list of phases, one after the other; the tasks of a phase may run at the same time, so a large operation
is split into tasks by its images. Which thread runs which task makes no difference to the result.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from loopfeed.models.kernels.onednn.library import Argument, Library

_ALIGNED = 64
_USER_SCRATCHPAD = 1
_MAX_DIMS = 12
TASKS_PER_THREAD = 4
"""So many tasks for each thread, so that a thread that has to wait for its core delays the others by little."""
# The library sums in another order for a single row, which a large number of threads must not lead to.
_LEAST_ROWS = 32
_LEAST_TASKS = 2
NO_BIAS = None
"""The argument of a primitive that has no bias."""

type Descriptor = int
"""The address of a memory descriptor (`dnnl_memory_desc_t`), which lives as long as the process."""

type Parts = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""The first index and the size of each part of an array, by oneDNN's order of axes; parts begin at whole blocks."""


class DataType(IntEnum):
    """The element types that cross (`dnnl_data_type_t`)."""

    BFLOAT16 = 2
    FLOAT32 = 3

    @classmethod
    def of(cls, dtype: str) -> "DataType":
        """Return the element type of an array of this dtype, such as "float32"."""
        return cls[dtype.upper()]

    @property
    def num_bytes(self) -> int:
        """The size of an element in bytes."""
        return 2 if self == DataType.BFLOAT16 else 4


class Tag(IntEnum):
    """Orders of axes in memory (`dnnl_format_tag_t`), of logical axes in oneDNN's order."""

    ANY = 1
    A = 2
    AB = 3
    BA = 14
    NHWC = 22
    HWIO = 28
    HWIGO = 39


class Arg(IntEnum):
    """What an argument of a primitive is (`DNNL_ARG_…`)."""

    SOURCE = 1
    RESULT = 17
    WEIGHTS = 33
    SCRATCHPAD = 80
    SOURCE_GRADIENT = 129
    RESULT_GRADIENT = 145
    WEIGHTS_GRADIENT = 161
    FIRST_OF_MANY = 1024


class Query(IntEnum):
    """What can be asked of a primitive (`dnnl_query_t`)."""

    IMPLEMENTATION = 8
    WEIGHTS = 131
    WEIGHTS_GRADIENT = 132
    SCRATCHPAD = 136


class Kind(IntEnum):
    """What a `Place` lies in."""

    OPERAND = 0
    RESULT = 1
    ARENA = 2


class Place(NamedTuple):
    """Where a value lies: `offset` bytes after the start of the operand or result `number`, or of the arena."""

    kind: Kind
    number: int
    offset: int = 0

    def after(self, num_bytes: int) -> "Place":
        """Return the place this many bytes further on."""
        return self._replace(offset=self.offset + num_bytes)


def operand(number: int) -> Place:
    """Return the place of an operand."""
    return Place(Kind.OPERAND, number)


def result(number: int) -> Place:
    """Return the place of a result."""
    return Place(Kind.RESULT, number)


class Value(NamedTuple):
    """An array inside a sequence: its layout, and where it lies."""

    layout: Descriptor
    place: Place


class Task(NamedTuple):
    """One primitive with its arguments, and the memory objects that are given an address before it runs."""

    primitive: ctypes.c_void_p
    arguments: "ctypes.Array[Argument]"
    memories: tuple[tuple[ctypes.c_void_p, Place], ...]


class Primitive(NamedTuple):
    """A primitive, and its descriptor; any number of tasks may run it at the same time."""

    descriptor: ctypes.c_void_p
    executable: ctypes.c_void_p


class SizedPrimitive(NamedTuple):
    """A primitive for parts of one size, and the layouts of the values of such a part."""

    primitive: Primitive
    layouts: tuple[Descriptor, ...]


class Primitives(NamedTuple):
    """A sequence that is ready to run.

    Attributes:
        phases: tasks by phase.
        arena_bytes: bytes of the arena that they need.
        names: the implementations that the library chose, such as "brgconv:avx512_core".
    """

    phases: tuple[tuple[Task, ...], ...]
    arena_bytes: int
    names: tuple[str, ...]


def sizes(values: Sequence[int]) -> Any:
    """Return an array of type `dnnl_dims_t`."""
    return (ctypes.c_int64 * _MAX_DIMS)(*values)


def pieces(total: int, number: int) -> list[tuple[int, int]]:
    """Split `total` things into at most `number` parts of nearly the same size; return the start and size of each."""
    number = max(1, min(number, total))
    ends = [total * part // number for part in range(number + 1)]
    return [(start, stop - start) for start, stop in itertools.pairwise(ends)]


class Builder:
    """Builds a sequence of primitives.

    Args:
        library: the loaded oneDNN.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self._arena_bytes = 0
        self._names: dict[str, None] = {}
        self._phases: list[tuple[Task, ...]] = []
        self._attributes = self._new("primitive_attr_create", "create attributes")
        status = library.short.dnnl_primitive_attr_set_scratchpad_mode(self._attributes, _USER_SCRATCHPAD)
        library.check(status, "take over scratchpads")

    def _new(self, function: str, what: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        status = getattr(self.library.short, f"dnnl_{function}")(ctypes.byref(made), *arguments)
        self.library.check(status, what)
        return made

    def describe(self, shape: Sequence[int], dtype: DataType, tag: Tag) -> Descriptor:
        """Return the descriptor of an array whose logical axes are in oneDNN's order (such as images, channels, …)."""
        what = f"describe an array of shape {tuple(shape)}"
        return self._new("memory_desc_create_with_tag", what, len(shape), sizes(shape), dtype, tag).value or 0

    def describe_strided(self, shape: Sequence[int], dtype: DataType, strides: Sequence[int]) -> Descriptor:
        """Return the descriptor of an array whose neighbours along each axis are so many elements apart."""
        what = f"describe an array of shape {tuple(shape)}"
        made = self._new("memory_desc_create_with_strides", what, len(shape), sizes(shape), dtype, sizes(strides))
        return made.value or 0

    def find(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        """Return the descriptor of a primitive, such as of kind "convolution_forward".

        Args:
            kind: the name between `dnnl_` and `_primitive_desc_create`.
            arguments: of that function, between the engine and the attributes.
        """
        what = f"find a kernel for {kind}"
        return self._new(f"{kind}_primitive_desc_create", what, *(self.library.engine, *arguments, self._attributes))

    def create(self, descriptor: ctypes.c_void_p) -> Primitive:
        """Return the primitive of a descriptor, after its code has been generated."""
        name = ctypes.c_char_p()
        place = ctypes.cast(ctypes.byref(name), ctypes.c_void_p)
        status = self.library.short.dnnl_primitive_desc_query(descriptor, Query.IMPLEMENTATION, 0, place)
        self.library.check(status, "name a kernel")
        self._names[(name.value or b"").decode()] = None
        return Primitive(descriptor, self._new("primitive_create", "create a primitive", descriptor))

    def create_for_each_size(
        self,
        parts: Iterable[tuple[int, int]],
        find: Callable[[int, Descriptor], tuple[ctypes.c_void_p, tuple[Descriptor, ...]]],
        layout: Descriptor,
        query: Query,
    ) -> tuple[dict[int, SizedPrimitive], Descriptor]:
        """Create a primitive for each size of a part; all share one operand or result in the layout of the largest.

        Args:
            parts: start and size of each part.
            find: from a size and the shared layout, returns a primitive's descriptor and the layouts of its own values.
            layout: what the shared layout may be at first.
            query: asks a primitive for the shared layout.

        Returns:
            The primitives by size, and the shared layout.
        """
        found: dict[int, SizedPrimitive] = {}
        for size in sorted({size for _, size in parts}, reverse=True):
            descriptor, layouts = find(size, layout)
            layout = layout if found else self.layout(descriptor, query)
            found[size] = SizedPrimitive(self.create(descriptor), layouts)
        return found, layout

    def create_products(
        self, parts: Iterable[tuple[int, int]], describe: Callable[[int], tuple[Descriptor, Descriptor, Descriptor]]
    ) -> dict[int, SizedPrimitive]:
        """Create a matrix product for each size of a part.

        Args:
            parts: start and size of each part.
            describe: from a size, returns the layouts of both factors and of the result.
        """
        found = {}
        for size in {size for _, size in parts}:
            x, y, z = describe(size)
            found[size] = SizedPrimitive(self.create(self.find("matmul", x, y, NO_BIAS, z)), (x, y, z))
        return found

    def layout(self, descriptor: ctypes.c_void_p, query: Query) -> Descriptor:
        """Return the layout that a primitive expects or gives; 0 if it has no such argument."""
        return self.library.short.dnnl_primitive_desc_query_md(descriptor, query, 0) or 0

    def num_bytes(self, layout: Descriptor) -> int:
        """Return the size of an array in bytes."""
        return int(self.library.short.dnnl_memory_desc_get_size(layout))

    def equal(self, one: Descriptor, other: Descriptor) -> bool:
        """Return whether two layouts are the same."""
        return bool(self.library.short.dnnl_memory_desc_equal(one, other))

    def reserve(self, layout: Descriptor) -> Value:
        """Reserve room in the arena until the end of the sequence."""
        place = Place(Kind.ARENA, 0, self._arena_bytes)
        self._arena_bytes += -(-self.num_bytes(layout) // _ALIGNED) * _ALIGNED
        return Value(layout, place)

    def task(self, primitive: Primitive, arguments: Mapping[int, Value]) -> Task:
        """Return a task that runs a primitive on these values, by `Arg`; it reserves the scratchpad."""
        given = dict(arguments)
        scratchpad = self.layout(primitive.descriptor, Query.SCRATCHPAD)
        if scratchpad and self.num_bytes(scratchpad):
            given[Arg.SCRATCHPAD] = self.reserve(scratchpad)
        listed, memories = (Argument * len(given))(), []
        for position, (number, value) in enumerate(given.items()):
            memory = self._new("memory_create", "create a memory object", value.layout, self.library.engine, None)
            listed[position] = Argument(number, memory.value)
            memories.append((memory, value.place))
        return Task(primitive.executable, listed, tuple(memories))

    def run(self, tasks: Iterable[Task]) -> None:
        """Append a phase: these tasks run at the same time, after all tasks before."""
        self._phases.append(tuple(tasks))

    def reordered(self, source: Value, layout: Descriptor, parts: Parts) -> Value:
        """Return a value in another layout, after a phase that brings it there if that is necessary."""
        if self.equal(source.layout, layout):
            return source
        value = self.reserve(layout)
        self.reorder(source, value, parts)
        return value

    def reorder(self, source: Value, target: Value, parts: Parts) -> None:
        """Append a phase that copies a value from one layout and element type into another.

        Args:
            source, target: the value before and after.
            parts: what each task copies; empty if one task copies all.
        """
        tasks = []
        for part in parts or (None,):
            one, other = (
                value if part is None else Value(self._part(value.layout, *part), value.place)
                for value in (source, target)
            )
            tasks.append(self.copy(one, other))
        self.run(tasks)

    def copy(self, source: Value, target: Value) -> Task:
        """Return a task that copies a value from one layout and element type into another."""
        engine = self.library.engine
        descriptor = self._new(
            "reorder_primitive_desc_create",
            "find a kernel for reorder",
            *(source.layout, engine, target.layout, engine, self._attributes),
        )
        return self.task(self.create(descriptor), {Arg.SOURCE: source, Arg.RESULT: target})

    def _part(self, layout: Descriptor, corner: Sequence[int], shape: Sequence[int]) -> Descriptor:
        what = f"describe a part of shape {tuple(shape)}"
        return self._new("memory_desc_create_submemory", what, layout, sizes(shape), sizes(corner)).value or 0

    def add(self, terms: Sequence[Value], target: Value, num_tasks: int) -> None:
        """Append a phase that adds float32 values of the same layout, element by element, in this order.

        Args:
            terms: what is added; the size of each is a multiple of 4 bytes.
            target: where the sum is written.
            num_tasks: number of tasks into which the phase is split.
        """
        tasks = []
        scales = (ctypes.c_float * len(terms))(*[1.0] * len(terms))
        for start, size in pieces(self.num_bytes(target.layout) // 4, num_tasks):
            part = self.describe((size,), DataType.FLOAT32, Tag.A)
            parts = (ctypes.c_void_p * len(terms))(*[part] * len(terms))
            primitive = self.create(self.find("sum", part, len(terms), scales, parts))
            sources = {
                Arg.FIRST_OF_MANY + number: Value(part, term.place.after(4 * start))
                for number, term in enumerate(terms)
            }
            tasks.append(self.task(primitive, {**sources, Arg.RESULT: Value(part, target.place.after(4 * start))}))
        self.run(tasks)

    def multiply_by_rows(
        self, x: Place, shape: tuple[int, int], strides: tuple[int, int], dtype: DataType, y: Value, columns: int
    ) -> None:
        """Append a phase that multiplies two matrices into the first result, as float32: each task some rows of `x`.

        Each task brings all of `y` into the layout of its kernel, so there is one for each thread, with enough rows to
        be worth that, but there are at least two: for the whole matrix the library chooses another kernel, which sums
        in another order.

        Args:
            x, shape, strides: where the first matrix lies, its rows and columns, and how many elements apart they are.
            dtype: of both matrices.
            y: the second matrix.
            columns: its columns.
        """
        rows, depth = shape
        parts = pieces(rows, min(max(_LEAST_TASKS, self.library.num_threads), rows // _LEAST_ROWS))

        def describe(size: int) -> tuple[Descriptor, Descriptor, Descriptor]:
            part = self.describe_strided((size, depth), dtype, strides)
            return part, y.layout, self.describe((size, columns), DataType.FLOAT32, Tag.AB)

        sized = self.create_products(parts, describe)
        tasks = []
        for start, size in parts:
            primitive, (part, _, z) = sized[size]
            of_x = Value(part, x.after(start * strides[0] * dtype.num_bytes))
            of_z = Value(z, result(0).after(start * columns * DataType.FLOAT32.num_bytes))
            tasks.append(self.task(primitive, {Arg.SOURCE: of_x, Arg.WEIGHTS: y, Arg.RESULT: of_z}))
        self.run(tasks)

    def finish(self) -> Primitives:
        """Return the sequence."""
        return Primitives(tuple(self._phases), self._arena_bytes, tuple(self._names))
