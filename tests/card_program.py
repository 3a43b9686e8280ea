"""The loops and kernels of XLA's optimised program for a card, read from its HLO text."""

import math
import re
from dataclasses import dataclass

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
# Operations that launch no kernel.
NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
HOST_CALL = "xla_buffer_python_gpu_callback"
# The name, the results, the operation and its operands.
INSTRUCTION = re.compile(r"\s+(?:ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)")

type Array = tuple[str, tuple[int, ...]]
"""A dtype and a shape."""


@dataclass(frozen=True)
class Loop:
    """A loop's body, and the number of its iterations if XLA knows it."""

    body: str
    turns: int | None


@dataclass(frozen=True)
class Kernel:
    """A kernel.

    Attributes:
        target: the target of a custom call, otherwise empty.
        operands, results: the arrays that it reads and writes.
        num_bytes: the bytes that it reads and writes.
    """

    target: str
    operands: list[Array]
    results: list[Array]
    num_bytes: int


class CardProgram:
    """The text of a program, divided into its computations."""

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
        """Return the kernels of one iteration of the loop over a chunk's batches."""
        (body,) = (loop.body for loop in self.loops() if "__cudnn$convBackwardFilter" in loop.body)
        results_of: dict[str, list[Array]] = {}
        kernels = []
        for line in body.splitlines():
            if not (parts := INSTRUCTION.match(line)):
                continue
            name, results, operation, operand_text = parts.groups()
            results_of[name] = arrays_of(results)
            if operation in NO_KERNEL:
                continue
            target = re.search(r'custom_call_target="([^"]*)"', line)
            calls = re.search(r" calls=(%[\w.\-]+)", line)
            operands = [results_of.get(operand, []) for operand in re.findall(r"%[\w.\-]+", operand_text)]
            read = (
                map(size_of, operands)
                if calls is None
                else self._bytes_read(self._computations[calls[1]], list(map(size_of, operands)))
            )
            kernels.append(
                Kernel(
                    target="" if target is None else target[1],
                    operands=[array for each in operands for array in each],
                    results=results_of[name],
                    num_bytes=sum(read) + size_of(results_of[name]),
                )
            )
        return kernels

    def _bytes_read(self, fused: str, sizes: list[int]) -> list[int]:
        """Return the bytes that a fused computation reads of each operand: only the slices, if it takes no more."""
        operand_of: dict[str, int] = {}
        sliced, whole = dict.fromkeys(range(len(sizes)), 0), set()
        for line in fused.splitlines():
            if not (parts := INSTRUCTION.match(line)):
                continue
            name, results, operation, operand_text = parts.groups()
            if operation == "parameter":
                operand_of[name] = int(operand_text)
                continue
            for taken in re.findall(r"%[\w.\-]+", operand_text):
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
    """Return the arrays of a type in HLO's notation."""
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in re.findall(r"\b(\w+)\[([\d,]*)\]", text)
    ]


def size_of(arrays: list[Array]) -> int:
    """Return the size of arrays in bytes."""
    return sum(BYTES[dtype] * math.prod(shape) for dtype, shape in arrays)
