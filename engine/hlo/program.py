"""An optimised XLA program: its computations, their instructions, and how they call each other.

The vocabulary is that of XLA's HLO (https://openxla.org/xla/operation_semantics). Knows nothing of the engine.

A call of a processor's own kernels (`loopfeed.models.kernels`) says in JSON what it computes, so that nothing has to be
built to count its work.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

# The bits of dtypes whose names do not say them, as those of s32 and f8e4m3fn do.
_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_TRIP_COUNT = re.compile(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')
# Instructions that regroup values of many scopes.
_ENDS = frozenset({"parameter", "tuple", "while", "conditional"})


HOST_SPACE = 5
"""XLA's number for the memory of the host, as a device with memory of its own sees it."""


class Array(NamedTuple):
    """An array that an instruction computes.

    Attributes:
        dtype: its dtype as HLO calls it: "f32", "bf16", "s32", "pred", …
        shape: its sizes.
        layout: its axes, the one with the smallest stride in memory first; empty if the text does not say.
        space: the number of the memory in which it is: 0 is the device's, `HOST_SPACE` the host's.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: tuple[int, ...] = ()
    space: int = 0

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The number of bytes without padding; 0 for a token."""
        return -(-self.size * bits_of(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Source(NamedTuple):
    """A place in the source code: a file, the function, empty if unknown, and a line from 1."""

    file: str
    function: str
    line: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction of a computation.

    Attributes:
        name: its name, unique in the program, without the leading "%".
        opcode: its operation: "add", "dot", "fusion", "custom-call", "while", …
        results: the arrays that it computes; those of a tuple, nested ones too, one after the other.
        operands: the names of its operands, in order.
        literal: what stands between the parentheses where that is not operands: the value of a constant, which XLA
            leaves out if it is long, or the number of a parameter.
        computation: the name of the computation to which it belongs.
        is_root: whether its results are those of the computation.
        calls: the names of the computations that it calls, by role: ("calls", of a fusion), ("body", …),
            ("condition", …), ("to_apply", …), ("branch_computations", …).
        op_name: the scopes and the primitive that it comes from, as jax named them; empty for what XLA added.
        frame: the number of its call stack for `HloProgram.call_stack`, 0 if there is none.
        attributes: the rest of its line, without its metadata.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    computation: str
    is_root: bool
    calls: tuple[tuple[str, str], ...]
    op_name: str
    frame: int
    attributes: str

    @property
    def num_bytes(self) -> int:
        """The bytes of its results."""
        return sum(each.num_bytes for each in self.results)

    @property
    def callees(self) -> tuple[str, ...]:
        """The names of the computations that it calls."""
        return tuple(name for _, name in self.calls)

    @property
    def target(self) -> str:
        """What a custom call calls; empty for other instructions."""
        return self.attribute("custom_call_target").strip('"')

    @property
    def trip_count(self) -> int | None:
        """How often the body of a loop runs, None if XLA does not know or this is no loop."""
        found = _TRIP_COUNT.search(self.attributes) if self.opcode == "while" else None
        return None if found is None else int(found[1])

    def attribute(self, name: str) -> str:
        """Return the text of an attribute, such as "{0,1}" of "dimensions={0,1}"; empty if there is none."""
        found = re.search(rf'(?:^|[\s,]){re.escape(name)}=("(?:[^"\\]|\\.)*"|\{{[^{{}}]*\}}|[^\s,]+)', self.attributes)
        return "" if found is None else found[1]

    def called_as(self, role: str) -> str | None:
        """Return the name of the computation that it calls in a role, None if there is none."""
        return next((name for each, name in self.calls if each == role), None)


@dataclass(frozen=True)
class Computation:
    """A computation: what XLA calls the body of a function, a loop or a fusion.

    Attributes:
        name: its name, without the leading "%".
        instructions: its instructions, in the order of the text, which is that of execution in a scheduled program.
        is_entry: whether it is the one that the program begins with.
    """

    name: str
    instructions: tuple[Instruction, ...]
    is_entry: bool = False

    @property
    def root(self) -> Instruction | None:
        """The instruction whose results are those of the computation."""
        return next((each for each in self.instructions if each.is_root), None)

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """Its parameters by their numbers."""
        found = (each for each in self.instructions if each.opcode == "parameter" and each.literal.isdigit())
        return MappingProxyType({int(each.literal): each for each in found})


@dataclass(frozen=True)
class HloProgram:
    """A program.

    Attributes:
        name: the name of its module, as in the events of a profile: "jit_train".
        computations: its computations by name, in the order of the text.
        frames: places in the source and the number of the frame that called each, by the number of the frame.
        header: the line with the properties of the module.
    """

    name: str
    computations: Mapping[str, Computation] = field(repr=False)
    frames: Mapping[int, tuple[Source, int]] = field(repr=False)
    header: str = field(default="", repr=False)

    @cached_property
    def instructions(self) -> Mapping[str, Instruction]:
        """Every instruction of the program by its name."""
        return MappingProxyType({each.name: each for part in self.computations.values() for each in part.instructions})

    @property
    def entry(self) -> Computation | None:
        """The computation that the program begins with."""
        return next((each for each in self.computations.values() if each.is_entry), None)

    @cached_property
    def caller_of(self) -> Mapping[str, str]:
        """The name of an instruction that calls each computation; the entry has none."""
        callers = {name: each.name for each in self.instructions.values() for name in each.callees}
        return MappingProxyType(callers)

    def operands_of(self, instruction: Instruction) -> list[Instruction]:
        """Return the operands of an instruction that the program has."""
        found = map(self.instructions.get, instruction.operands)
        return [each for each in found if each is not None]

    def call_stack(self, instruction: Instruction) -> list[Source]:
        """Return the places in the source that an instruction comes from, the innermost first."""
        places: list[Source] = []
        number = instruction.frame
        while number in self.frames and len(places) <= len(self.frames):
            place, parent = self.frames[number]
            places.append(place)
            if parent == number:
                break
            number = parent
        return places

    def root_of(self, instruction: Instruction) -> Instruction:
        """Return the root of a fusion's or a call's computation, of the innermost if nested; else the instruction."""
        for _ in range(len(self.computations)):
            called = instruction.called_as("calls" if instruction.opcode != "call" else "to_apply")
            computation = None if called is None else self.computations.get(called)
            if computation is None or computation.root is None:
                break
            instruction = computation.root
        return instruction

    def op_name_of(self, instruction: Instruction) -> str:
        """Return the scopes and the primitive of an instruction: its own; of a fusion, else those of its root.

        What XLA added has none. It gets those of the nearest instruction, inside its fusion, before it or after it, in
        this order, that it computes from or for. Empty if there are none: parameters and the values of a carry.
        """
        if name := instruction.op_name or self._inside(instruction):
            return name
        return self._near(instruction, self.operands_of) or self._near(instruction, self.users_of)

    def users_of(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions that have an instruction as an operand."""
        return [self.instructions[name] for name in self._user_names.get(instruction.name, ())]

    @cached_property
    def _user_names(self) -> Mapping[str, list[str]]:
        users: dict[str, list[str]] = {}
        for each in self.instructions.values():
            for operand in dict.fromkeys(each.operands):
                users.setdefault(operand, []).append(each.name)
        return users

    def _near(self, instruction: Instruction, neighbours: Callable[[Instruction], list[Instruction]]) -> str:
        """Return the scopes of the nearest instruction in one direction that has any."""
        seen = {instruction.name}
        ahead = neighbours(instruction)
        for each in ahead:
            if each.name in seen or each.opcode in _ENDS:
                continue
            seen.add(each.name)
            if name := each.op_name or self._inside(each):
                return name
            ahead += neighbours(each)
        return ""

    def _inside(self, instruction: Instruction) -> str:
        """Return the scopes of a fusion's root, or of the instruction nearest to it that has any."""
        root = self.root_of(instruction)
        fused = self.computations[root.computation].instructions if root.name != instruction.name else ()
        return root.op_name or next((each.op_name for each in reversed(fused) if "/" in each.op_name), "")

    def within(self, computation: str, *, fused: bool = False) -> Iterator[Instruction]:
        """Yield the instructions of a computation and, after each call, loop or branch, of what it calls.

        Args:
            computation: the name of the computation.
            fused: whether to yield also those inside fusions, and the functions that reductions and sorts apply.
        """
        seen = {computation}
        ahead = [iter(self.instructions_of(computation))]
        while ahead:
            each = next(ahead[-1], None)
            if each is None:
                ahead.pop()
                continue
            yield each
            callees = [name for name in each.callees if name not in seen] if fused or each.opcode in _RUNS else []
            seen.update(callees)
            ahead += [iter(self.instructions_of(name)) for name in reversed(callees)]

    def instructions_of(self, computation: str) -> tuple[Instruction, ...]:
        """Return the instructions of a computation, none if the program does not have it."""
        found = self.computations.get(computation)
        return () if found is None else found.instructions

    def loops_around(self, computation: str) -> list[Instruction]:
        """Return the loops that stand around a computation, the innermost first."""
        loops: list[Instruction] = []
        for _ in range(len(self.computations)):
            caller = self.instructions.get(self.caller_of.get(computation, ""))
            if caller is None:
                break
            if caller.called_as("body") == computation:
                loops.append(caller)
            computation = caller.computation
        return loops


# Instructions whose computations run as such: the others apply theirs to elements, or are fused into one kernel.
_RUNS = frozenset({"while", "conditional", "call", "async-start", "custom-call"})


def bits_of(dtype: str) -> int:
    """Return the number of bits of an element of a dtype in HLO's notation; an unknown one has 32."""
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)
    return 32 if found is None else int(found[1])


KERNEL_TARGET = "loopfeed_onednn"
"""What a call of such a kernel names as its target (`loopfeed.models.kernels.onednn.handler.TARGET`)."""
_OPERATION = re.compile(r'operation = "((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\([0-9A-Fa-f]{2}|.)")


def is_kernel(instruction: Instruction) -> bool:
    """Return whether an instruction calls one of a processor's own kernels."""
    return instruction.opcode == "custom-call" and instruction.target == KERNEL_TARGET


def kernel_operation(instruction: Instruction) -> Mapping[str, Any]:
    """Return the description of the operation that such a call makes; empty if it has none that can be read."""
    return _read(instruction.attributes)


def kernel_flops(text: str) -> int:
    """Return the floating-point operations of all such calls in a program's text, each counted once."""
    lines = (line for line in text.splitlines() if f'"{KERNEL_TARGET}"' in line)
    return sum(2 * operation_products(_read(line)) for line in lines)


def operation_products(operation: Mapping[str, Any]) -> int:
    """Return the multiply-accumulates of an operation, those with padding left out; 0 for one that has none."""
    if operation.get("kind") in ("product", "batched product"):
        others = [size for axis, size in enumerate(operation["y"]) if axis != operation["y_axis"]]
        return int(math.prod(operation["x"]) * others[-1])
    if operation.get("kind") != "convolution":
        return 0
    images, height, width, _ = operation["x"]
    kernel_height, kernel_width, in_channels, out_channels = operation["kernel"]
    (top, bottom), (left, right) = operation["padding"]
    if operation["part"] == "filter gradient by product":  # its input has the padding already
        height, width = height - top - bottom, width - left - right
    products = images * in_channels * out_channels
    for size, window, num_results, stride, low in (
        (height, kernel_height, operation["y"][1], operation["strides"][0], top),
        (width, kernel_width, operation["y"][2], operation["strides"][1], left),
    ):
        products *= count_meetings(size, window, num_results, stride, low)
    return int(products)


@lru_cache(maxsize=1024)
def count_meetings(
    size: int, window: int, num_results: int, stride: int, low: int, dilated: int = 1, spread: int = 1
) -> int:
    """Return how often an element of a window meets a number of the input, along one axis.

    Args:
        size: numbers of the input.
        window: elements of the window.
        num_results: positions of the window.
        stride: step between them.
        low: padding before the first number.
        dilated: distance of the numbers of the input.
        spread: distance of the elements of the window.
    """
    last = (size - 1) * dilated
    positions = (at * stride + tap * spread - low for at in range(num_results) for tap in range(window))
    return sum(1 for position in positions if 0 <= position <= last and position % dilated == 0)


def _read(attributes: str) -> Mapping[str, Any]:
    found = _OPERATION.search(attributes)
    if found is None:
        return {}
    try:
        operation = json.loads(_ESCAPED.sub(_unescaped, found[1]))
    except ValueError:
        return {}
    return operation if isinstance(operation, dict) else {}


def _unescaped(found: re.Match[str]) -> str:
    """Return the character that MLIR writes as a backslash and two hexadecimal digits, or after a backslash."""
    return chr(int(found[1], 16)) if len(found[1]) == 2 else found[1]
