"""Primitives of oneDNN: memory descriptors, and sequences of primitives that run on addresses given at each call.

Arrays that cross are dense and in the order of their axes; between the primitives of one sequence a value may have any
layout that the library prefers. Such values and the scratchpads lie in one arena, which all sequences of the process
share: `RunningPrimitives` therefore runs one sequence at a time.
"""

import ctypes
import threading
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from models.kernels.onednn.library import Argument, Library

_ALIGNED = 64
_USER_SCRATCHPAD = 1
_MAX_DIMS = 12

type Descriptor = int
"""The address of a memory descriptor (`dnnl_memory_desc_t`), which lives as long as the process."""


class DataType(IntEnum):
    """The element types that cross (`dnnl_data_type_t`)."""

    BFLOAT16 = 2
    FLOAT32 = 3
    UINT8 = 6


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
    MEAN = 49
    VARIANCE = 50
    SCALE = 51
    SHIFT = 52
    WORKSPACE = 64
    SCRATCHPAD = 80
    SOURCE_GRADIENT = 129
    RESULT_GRADIENT = 145
    WEIGHTS_GRADIENT = 161
    SCALE_GRADIENT = 255
    SHIFT_GRADIENT = 256


class Query(IntEnum):
    """What can be asked of a primitive (`dnnl_query_t`)."""

    IMPLEMENTATION = 8
    SOURCE = 129
    SOURCE_GRADIENT = 130
    WEIGHTS = 131
    WEIGHTS_GRADIENT = 132
    RESULT = 133
    RESULT_GRADIENT = 134
    WORKSPACE = 135
    SCRATCHPAD = 136


class Place(NamedTuple):
    """Where a value lies: operand or result number `number` of the call, or `number` bytes into the arena."""

    kind: str
    number: int


class _Step(NamedTuple):
    """One primitive with its arguments, and the memory objects that are given an address before each run."""

    primitive: Any
    num_arguments: int
    arguments: Any
    memories: tuple[tuple[Any, Place], ...]


def sizes(values: Sequence[int]) -> Any:
    """Return an array of type `dnnl_dims_t`."""
    return (ctypes.c_int64 * _MAX_DIMS)(*values)


class Builder:
    """Builds a sequence of primitives.

    Args:
        library: the loaded oneDNN.

    Attributes:
        arena_bytes: bytes of the arena that the sequence needs.
        names: the implementations that the library chose, such as "brgconv:avx512_core".
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.arena_bytes = 0
        self.names: list[str] = []
        self._steps: list[_Step] = []
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

    def primitive(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        """Return the descriptor of a primitive, such as of kind "convolution_forward", whose scratchpad is ours.

        Args:
            kind: the name between `dnnl_` and `_primitive_desc_create`.
            arguments: of that function, between the engine and the attributes.
        """
        engine = self.library.engine
        return self._new(
            f"{kind}_primitive_desc_create", f"find a kernel for {kind}", engine, *arguments, self._attributes
        )

    def layout(self, primitive: ctypes.c_void_p, query: Query) -> Descriptor:
        """Return the layout that a primitive expects or gives; 0 if it has no such argument."""
        return self.library.short.dnnl_primitive_desc_query_md(primitive, query, 0) or 0

    def num_bytes(self, descriptor: Descriptor) -> int:
        """Return the size of an array in bytes."""
        return int(self.library.short.dnnl_memory_desc_get_size(descriptor))

    def equal(self, one: Descriptor, other: Descriptor) -> bool:
        """Return whether two descriptors describe the same layout."""
        return bool(self.library.short.dnnl_memory_desc_equal(one, other))

    def in_arena(self, descriptor: Descriptor) -> Place:
        """Reserve room in the arena until the end of the sequence."""
        start = self.arena_bytes
        self.arena_bytes += -(-self.num_bytes(descriptor) // _ALIGNED) * _ALIGNED
        return Place("arena", start)

    def run(self, primitive: ctypes.c_void_p, places: Mapping[Arg, tuple[Descriptor, Place]]) -> None:
        """Append a primitive that runs on the values at these places."""
        scratchpad = self.layout(primitive, Query.SCRATCHPAD)
        given = dict(places)
        if scratchpad and self.num_bytes(scratchpad):
            given[Arg.SCRATCHPAD] = scratchpad, self.in_arena(scratchpad)
        arguments = (Argument * len(given))()
        memories = []
        for position, (number, (descriptor, place)) in enumerate(given.items()):
            memory = self._new("memory_create", "create a memory object", descriptor, self.library.engine, None)
            arguments[position] = Argument(number, memory.value)
            memories.append((memory, place))
        name = ctypes.c_char_p()
        status = self.library.short.dnnl_primitive_desc_query(
            primitive, Query.IMPLEMENTATION, 0, ctypes.cast(ctypes.byref(name), ctypes.c_void_p)
        )
        self.library.check(status, "name a kernel")
        self.names.append((name.value or b"").decode())
        executable = self._new("primitive_create", "create a primitive", primitive)
        self._steps.append(_Step(executable, len(given), arguments, tuple(memories)))

    def reordered(self, source: tuple[Descriptor, Place], layout: Descriptor) -> tuple[Descriptor, Place]:
        """Return where a value lies in another layout, after a step that brings it there if that is necessary."""
        if self.equal(source[0], layout):
            return source
        result = layout, self.in_arena(layout)
        self.reorder(source, result)
        return result

    def reorder(self, source: tuple[Descriptor, Place], result: tuple[Descriptor, Place]) -> None:
        """Append a step that copies a value from one layout and element type into another."""
        engine = self.library.engine
        primitive = self._new(
            "reorder_primitive_desc_create",
            "find a kernel for reorder",
            *(source[0], engine, result[0], engine, self._attributes),
        )
        self.run(primitive, {Arg.SOURCE: source, Arg.RESULT: result})

    def finish(self) -> "Sequenced":
        """Return the sequence."""
        return Sequenced(tuple(self._steps), self.arena_bytes, tuple(self.names))


class Sequenced(NamedTuple):
    """A sequence of primitives, ready to run.

    Attributes:
        steps: the primitives.
        arena_bytes: bytes of the arena that they need.
        names: the implementations of the primitives.
    """

    steps: tuple[_Step, ...]
    arena_bytes: int
    names: tuple[str, ...]


class RunningPrimitives:
    """Runs sequences, one at a time, whichever threads ask: they share memory objects, the arena, and the processor."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._arena: Any = None
        self._arena_address = 0
        self._arena_bytes = -1

    def run(self, sequence: Sequenced, operands: Sequence[int], results: Sequence[int]) -> None:
        """Run a sequence on operands and results at these addresses.

        Raises:
            RuntimeError: if a primitive fails.
        """
        set_address = self._library.short.dnnl_memory_set_data_handle
        execute, stream = self._library.long.dnnl_primitive_execute, self._library.stream
        with self._lock:
            if sequence.arena_bytes > self._arena_bytes:
                self._grow(sequence.arena_bytes)
            arena = self._arena_address
            for step in sequence.steps:
                for memory, (kind, number) in step.memories:
                    if kind == "operand":
                        set_address(memory, operands[number])
                    elif kind == "result":
                        set_address(memory, results[number])
                    else:
                        set_address(memory, arena + number)
                if status := execute(step.primitive, stream, step.num_arguments, step.arguments):
                    self._library.check(status, "run a primitive")

    def _grow(self, num_bytes: int) -> None:
        """Allocate a larger arena; it never shrinks, so that a loop allocates only in its first turn."""
        self._arena = ctypes.create_string_buffer(num_bytes + _ALIGNED)
        self._arena_address = -(-ctypes.addressof(self._arena) // _ALIGNED) * _ALIGNED
        self._arena_bytes = num_bytes
