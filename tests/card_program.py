"""What XLA's optimised program for a card has its loops do: read from its text, as HLO."""

import math
import re
from dataclasses import dataclass

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
# What launches nothing.
NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
CALL_OF_THE_HOST = "xla_buffer_python_gpu_callback"
# A name, what it gives, its operation, that one's operands.
INSTRUCTION = re.compile(r"\s+(?:ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)")

type Array = tuple[str, tuple[int, ...]]
"""A dtype and a shape."""


@dataclass(frozen=True)
class Loop:
    """A loop's body, and the number of its turns where XLA knows it."""

    body: str
    turns: int | None


@dataclass(frozen=True)
class Kernel:
    """What is launched.

    Attributes:
        target: of a custom call, otherwise empty.
        operands, results: the arrays that it reads and gives.
        num_bytes: of these, read and written.
    """

    target: str
    operands: list[Array]
    results: list[Array]
    num_bytes: int


class CardProgram:
    """A program's text, by computations."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._computations = {part.split(" ", 1)[0]: part for part in re.split(r"\n(?=%|ENTRY )", text)}

    def loops(self) -> list[Loop]:
        """Return every loop."""
        found = []
        for line in self.text.splitlines():
            if body := re.search(r" while\(.*body=(%[\w.\-]+)", line):
                turns = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                found.append(Loop(self._computations[body[1]], None if turns is None else int(turns[1])))
        return found

    def training_step(self) -> list[Kernel]:
        """Return the kernels of one turn of the loop over a chunk's batches."""
        (body,) = (loop.body for loop in self.loops() if "__cudnn$convBackwardFilter" in loop.body)
        gives: dict[str, list[Array]] = {}
        kernels = []
        for line in body.splitlines():
            if not (parts := INSTRUCTION.match(line)):
                continue
            name, results, operation, takes = parts.groups()
            gives[name] = arrays_of(results)
            if operation in NO_KERNEL:
                continue
            target = re.search(r'custom_call_target="([^"]*)"', line)
            calls = re.search(r" calls=(%[\w.\-]+)", line)
            operands = [gives.get(operand, []) for operand in re.findall(r"%[\w.\-]+", takes)]
            read = (
                map(size_of, operands)
                if calls is None
                else self._read_of_each(self._computations[calls[1]], list(map(size_of, operands)))
            )
            kernels.append(
                Kernel(
                    target="" if target is None else target[1],
                    operands=[array for each in operands for array in each],
                    results=gives[name],
                    num_bytes=sum(read) + size_of(gives[name]),
                )
            )
        return kernels

    def _read_of_each(self, fused: str, sizes: list[int]) -> list[int]:
        """Return the bytes that a fused computation reads of each operand: where it takes slices alone, no more."""
        operand_of: dict[str, int] = {}
        sliced, whole = dict.fromkeys(range(len(sizes)), 0), set()
        for line in fused.splitlines():
            if not (parts := INSTRUCTION.match(line)):
                continue
            name, results, operation, takes = parts.groups()
            if operation == "parameter":
                operand_of[name] = int(takes)
                continue
            for taken in re.findall(r"%[\w.\-]+", takes):
                if taken not in operand_of:
                    continue
                number = operand_of[taken]
                if operation in ("convert", "bitcast"):
                    operand_of[name] = number
                elif operation == "slice":
                    sliced[number] += size_of(arrays_of(results))
                else:
                    whole.add(number)
        return [
            size if number in whole or not sliced[number] else min(size, sliced[number])
            for number, size in enumerate(sizes)
        ]


def arrays_of(text: str) -> list[Array]:
    """Return the arrays of a type as HLO writes it."""
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in re.findall(r"\b(\w+)\[([\d,]*)\]", text)
    ]


def size_of(arrays: list[Array]) -> int:
    """Return their bytes."""
    return sum(BYTES[dtype] * math.prod(shape) for dtype, shape in arrays)
