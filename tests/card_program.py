"""The loops and kernels of XLA's optimised program for a card, read from its HLO text."""

import re
from dataclasses import dataclass

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
    """

    target: str
    operands: list[Array]
    results: list[Array]


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
            operands = [results_of.get(operand, []) for operand in re.findall(r"%[\w.\-]+", operand_text)]
            kernels.append(
                Kernel(
                    target="" if target is None else target[1],
                    operands=[array for each in operands for array in each],
                    results=results_of[name],
                )
            )
        return kernels


def arrays_of(text: str) -> list[Array]:
    """Return the arrays of a type in HLO's notation."""
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in re.findall(r"\b(\w+)\[([\d,]*)\]", text)
    ]
