"""The memory that a batch needs on a device: which arrays are alive where it is most, and what holds them.

Computed from the order in which XLA scheduled the instructions: an array lives from the instruction that computes it to
the last one that reads it. XLA lets some results take the place of operands, so its own figure is lower.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from loopfeed.engine.hlo.program import Array, HloProgram, Instruction, Source
from loopfeed.engine.hlo.work import CONTAINERS, NO_KERNELS, kept_results
from loopfeed.engine.inspection.steps import Steps

# Instructions whose result is memory of their operand.
_ALIASES = frozenset({"bitcast", "domain", "add-dependency", "opt-barrier", "while"})


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

    num_bytes: int = 0
    inner_bytes: int = 0
    at: str = ""
    buffers: tuple[Buffer, ...] = ()


@dataclass
class _Life:
    """An array, the instruction that computes it, and the places in the schedule from which and to which it lives.

    `last` is the instruction that reads it last, None if the computation returns it.
    """

    array: Array
    instruction: Instruction
    start: int
    end: int
    last: Instruction | None


def find_peak(steps: Steps, phase: str) -> Peak:
    """Return the moment at which the loop over the batches of a phase needs most memory."""
    loop = steps.loop_of(phase)
    body = None if loop is None else loop.called_as("body")
    instructions = () if body is None else steps.program.instructions_of(body)
    if not instructions:
        return Peak()
    lives, inner = _lives(instructions), _inner_bytes(steps.program, instructions, 0)
    totals = _totals(lives, inner)
    at = max(range(len(totals)), key=lambda place: totals[place])
    alive = [life for life in lives if life.start <= at <= life.end]
    alive.sort(key=lambda life: (life.array.num_bytes, life.start), reverse=True)
    return Peak(totals[at], inner[at], steps.name_of(instructions[at]), tuple(_describe(steps, each) for each in alive))


def _lives(instructions: Sequence[Instruction]) -> list[_Life]:
    """Return from where to where in the schedule each array is alive that a computation computes."""
    # The arrays of each result of an instruction; those of a tuple one after the other.
    held: dict[str, list[list[_Life]]] = {}
    found: list[_Life] = []
    for place, each in enumerate(instructions):
        operands = [held.get(name, []) for name in each.operands]
        if each.opcode == "get-tuple-element":
            index = int(each.attribute("index") or 0)
            operands = [parts[index : index + 1] for parts in operands]
        read = [life for parts in operands for part in parts for life in part]
        for life in read:
            life.end, life.last = place, each
        if each.opcode == "tuple":
            held[each.name] = [[life for part in parts for life in part] for parts in operands]
        elif each.opcode == "get-tuple-element" or each.opcode in _ALIASES:
            held[each.name] = operands[0] if operands else []
        elif each.opcode not in NO_KERNELS:
            made = [_Life(array, each, place, place, each) for array in kept_results(each)]
            held[each.name] = [[life] for life in made]
            found += [life for life in made if life.array.num_bytes]
        if each.is_root:
            for life in (life for part in held.get(each.name, []) for life in part):
                life.end, life.last = len(instructions), None
    return found


def _totals(lives: Sequence[_Life], inner: Sequence[int]) -> list[int]:
    """Return the bytes that are alive at each place of the schedule."""
    changes = [0] * (len(inner) + 2)
    for life in lives:
        changes[life.start] += life.array.num_bytes
        changes[life.end + 1] -= life.array.num_bytes
    totals, alive = [], 0
    for change, inside in zip(changes, inner, strict=False):
        alive += change
        totals.append(alive + inside)
    return totals


def _inner_bytes(program: HloProgram, instructions: Sequence[Instruction], depth: int) -> list[int]:
    """Return, for each instruction, the most memory that the computations of a loop, branch or call need themselves."""
    found = []
    for each in instructions:
        is_container = each.opcode in CONTAINERS and depth <= len(program.computations)
        called = [program.instructions_of(name) for name in each.callees] if is_container else []
        peaks = (_totals(_lives(part), _inner_bytes(program, part, depth + 1)) for part in called)
        found.append(max((size for totals in peaks for size in totals), default=0))
    return found


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
