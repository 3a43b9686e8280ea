"""The memory that a batch needs on a device: which arrays are alive where it is most, and what holds them.

Computed from the order in which XLA scheduled the instructions: an array lives from the instruction that computes it to
the last one that reads it. XLA lets some results take the place of operands, so its own figure is lower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loopfeed.engine.hlo.program import Array, HloProgram, Instruction, Source
from loopfeed.engine.hlo.work import CONTAINERS, NO_KERNELS, kept_results
from loopfeed.engine.inspection.steps import Steps

# Instructions whose result is memory of their operands.
_ALIASES = frozenset({"bitcast", "domain", "add-dependency"})
_SAME_PARTS = frozenset({"while", "opt-barrier"})


@dataclass(frozen=True)
class Buffer:
    """An array that the loop over batches computes.

    Attributes:
        name: the instruction that computes it.
        array: its dtype and shape.
        num_bytes: its size.
        made_by: the scope that computes it, such as "train/forward/layer1/0/conv1".
        held_for: the scope that reads it last; "the next turn" if the loop carries it.
        source: the line of code that it comes from, None if XLA added it.
    """

    name: str
    array: Array
    num_bytes: int
    made_by: str
    held_for: str
    source: Source | None


@dataclass(frozen=True)
class Peak:
    """The moment at which the arrays of a batch take most memory.

    Attributes:
        num_bytes: what they take, the carry of the loop not included.
        inner_bytes: the part of it that a loop or branch needs inside, if one runs at that moment.
        at: the scope that runs at that moment.
        buffers: the arrays that are alive then, the largest first.
    """

    num_bytes: int
    inner_bytes: int
    at: str
    buffers: tuple[Buffer, ...]


NO_PEAK = Peak(0, 0, "", ())
"""The peak of a program without a loop over batches."""


class _Life(NamedTuple):
    """An array, the instruction that computes it, and the places in the schedule from which and to which it lives.

    `last` is the instruction that reads it last, None if the computation returns it.
    """

    array: Array
    instruction: Instruction
    start: int
    end: int
    last: Instruction | None


class _Use(NamedTuple):
    end: int
    last: Instruction | None


def find_peak(steps: Steps, phase: str) -> Peak:
    """Return the moment at which the loop over the batches of a phase needs most memory."""
    loop = steps.loop_of(phase)
    body = None if loop is None else loop.called_as("body")
    if body is None or body not in steps.program.computations:
        return NO_PEAK
    instructions = steps.program.computations[body].instructions
    lives = _lives(instructions)
    inner = {place: _peak_bytes(steps.program, each, 0) for place, each in enumerate(instructions) if _calls(each)}
    totals = _totals(lives, len(instructions), inner)
    if not totals:
        return NO_PEAK
    at = max(range(len(totals)), key=lambda place: totals[place])
    alive = [life for life in lives if life.start <= at <= life.end]
    alive.sort(key=lambda life: -life.array.num_bytes)
    return Peak(
        totals[at], inner.get(at, 0), steps.name_of(instructions[at]), tuple(_describe(steps, life) for life in alive)
    )


def _lives(instructions: Sequence[Instruction]) -> list[_Life]:
    """Return from where to where in the schedule each array is alive that a computation computes."""
    # By the name of an instruction; of one with several results by the number of the result, or None for all.
    uses: dict[str, dict[int | None, _Use]] = {}
    lives: list[_Life] = []
    for place in reversed(range(len(instructions))):
        each = instructions[place]
        parts = uses.get(each.name, {})
        own = _Use(len(instructions), None) if each.is_root else parts.get(None, _Use(place, each))
        for number, operand in enumerate(each.operands):
            for part, use in _uses_of_operand(each, number, place, own, parts).items():
                known = uses.setdefault(operand, {})
                known[part] = _later(known.get(part, use), use)
        if each.opcode in NO_KERNELS or each.opcode == "while":
            continue
        for number, array in enumerate(kept_results(each)):
            if array.num_bytes:
                life = _later(own, parts.get(number, own))
                lives.append(_Life(array, each, place, life.end, life.last))
    return lives


def _uses_of_operand(
    instruction: Instruction, number: int, place: int, own: _Use, parts: Mapping[int | None, _Use]
) -> dict[int | None, _Use]:
    """Return how an instruction uses its operand: until what is the same memory is used last, else where it stands."""
    if instruction.opcode == "get-tuple-element":
        return {int(instruction.attribute("index") or 0): own}
    if instruction.opcode == "tuple":
        return {None: _later(own, parts.get(number, own))}
    if instruction.opcode in _SAME_PARTS:
        return {**parts, None: own}
    return {None: own if instruction.opcode in _ALIASES else _Use(place, instruction)}


def _later(one: _Use, other: _Use) -> _Use:
    return other if other.end > one.end else one


def _totals(lives: Sequence[_Life], count: int, inner: dict[int, int]) -> list[int]:
    changes = [0] * (count + 2)
    for life in lives:
        changes[life.start] += life.array.num_bytes
        changes[life.end + 1] -= life.array.num_bytes
    totals, total = [], 0
    for place in range(count):
        total += changes[place]
        totals.append(total + inner.get(place, 0))
    return totals


def _calls(instruction: Instruction) -> bool:
    return instruction.opcode in CONTAINERS


def _peak_bytes(program: HloProgram, container: Instruction, depth: int) -> int:
    """Return the most memory that the computations of a loop, branch or call need themselves."""
    if depth > len(program.computations):
        return 0
    largest = 0
    for name in container.callees:
        if name not in program.computations:
            continue
        instructions = program.computations[name].instructions
        lives = _lives(instructions)
        inner = {
            place: _peak_bytes(program, each, depth + 1) for place, each in enumerate(instructions) if _calls(each)
        }
        largest = max([largest, *_totals(lives, len(instructions), inner)])
    return largest


def _describe(steps: Steps, life: _Life) -> Buffer:
    each = life.instruction
    return Buffer(
        name=each.name,
        array=life.array,
        num_bytes=life.array.num_bytes,
        made_by=steps.name_of(each),
        held_for="the next turn" if life.last is None else steps.name_of(life.last),
        source=steps.source_of(each),
    )
