"""The carry of a compiled program's loops, leaf by leaf: its names, and what is copied on the way.

XLA adds values that do not change to the carry, and drops the names of its elements; they are traced back here to the
arguments of the program.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loopfeed.engine.hlo.program import HloProgram, Instruction
from loopfeed.engine.inspection.steps import Steps
from loopfeed.engine.scopes import TRAIN

_STATE = "state."
_PASSED_ON = frozenset({"copy", "bitcast", "opt-barrier", "copy-start", "copy-done"})


@dataclass(frozen=True)
class CarryLeaf:
    """A leaf of the training state, as the loops carry it.

    Attributes:
        name: its place in `TrainState`, such as "params.fc.kernel".
        dtype: its dtype as HLO calls it.
        shape: its shape.
        num_bytes: its size.
        is_donated: whether the result takes the memory of the argument.
        copied_bytes: bytes of it that the loops copy for each batch without changing them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    is_donated: bool
    copied_bytes: int


@dataclass(frozen=True)
class Carry:
    """What the loop over batches carries from one turn to the next.

    Attributes:
        leaves: the leaves of the training state, in its order.
        num_others, other_bytes: number and size of the other values: those that do not change, which XLA hands through.
    """

    leaves: tuple[CarryLeaf, ...]
    num_others: int
    other_bytes: int

    @property
    def num_bytes(self) -> int:
        """The size of the training state."""
        return sum(leaf.num_bytes for leaf in self.leaves)


def read_carry(steps: Steps) -> Carry:
    """Return the carry of the training loops of a program; without leaves if it has no such loop."""
    program, frames = steps.program, steps.frames_of(TRAIN)
    if program.entry is None or not frames:
        return Carry((), 0, 0)
    donated = set(map(int, re.findall(r"\}: \((\d+),", program.header)))
    copied: Counter[str] = Counter()
    names: list[str] = []
    for loop in reversed(frames):
        names = _names_of(program, loop, names)
        for name, size in _copies_in(program, loop, names):
            copied[name] += size
    leaves = tuple(
        CarryLeaf(
            name=_dotted(each.op_name.removeprefix(_STATE)),
            dtype=each.results[0].dtype,
            shape=each.results[0].shape,
            num_bytes=each.num_bytes,
            is_donated=number in donated,
            copied_bytes=copied[each.op_name],
        )
        for number, each in sorted(program.entry.parameters.items())
        if each.op_name.startswith(_STATE) and each.results
    )
    others = [array for name, array in zip(names, frames[0].results, strict=False) if not name.startswith(_STATE)]
    return Carry(leaves, len(others), sum(array.num_bytes for array in others))


def _names_of(program: HloProgram, loop: Instruction, outer: Sequence[str]) -> list[str]:
    """Return the name of each element of a loop's carry: the argument that it starts from, empty if it has none."""
    starts = program.operands_of(loop)
    if len(starts) != 1 or starts[0].opcode != "tuple":
        return [""] * len(loop.results)
    return [_origin(program, each, outer) for each in program.operands_of(starts[0])]


def _origin(program: HloProgram, instruction: Instruction, outer: Sequence[str]) -> str:
    """Return the name of the argument that a value is; `outer` names the elements of the carry around it."""
    for _ in range(len(program.instructions)):
        operands = program.operands_of(instruction)
        if instruction.opcode == "parameter":
            return instruction.op_name if instruction.op_name.startswith(("state.", "values.")) else ""
        if instruction.opcode == "get-tuple-element" and operands:
            index = int(instruction.attribute("index") or 0)
            source = operands[0]
            if source.opcode == "parameter":
                return outer[index] if index < len(outer) else ""
            if source.opcode in ("while", "opt-barrier"):
                source = next(iter(program.operands_of(source)), source)
            if source.opcode != "tuple" or index >= len(source.operands):
                return ""
            instruction = program.instructions[source.operands[index]]
        elif instruction.opcode in _PASSED_ON and operands:
            instruction = operands[0]
        else:
            return ""
    return ""


def _copies_in(program: HloProgram, loop: Instruction, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the name and the bytes of each copy of an element of the carry in a loop's body."""
    instructions = program.instructions_of(loop.called_as("body") or "")
    # By the name of each value that becomes an element of the next turn's carry, that element's name.
    roots = (each.operands for each in instructions if each.is_root and each.opcode == "tuple")
    kept = {operand: name for operands in roots for operand, name in zip(operands, names, strict=False) if name}
    for each in instructions:
        if each.opcode in ("copy", "copy-start") and each.results:
            name = _origin(program, each, names) or kept.get(each.name, "")
            if name.startswith(_STATE):
                yield name, each.results[0].num_bytes


def _dotted(name: str) -> str:
    """Return "params.fc.kernel" for "params['fc']['kernel']", whose quotes XLA's text escapes."""
    return re.sub(r"\[\\?'?(.*?)\\?'?\]", r".\1", name)
