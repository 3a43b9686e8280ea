"""What a compiled program does beside computing: calls of the host, fusions, and copies and transposes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loopfeed.engine.hlo.program import Array, Instruction, Source
from loopfeed.engine.hlo.work import bytes_of, fused_into
from loopfeed.engine.inspection.steps import Steps
from loopfeed.engine.scopes import SNAPSHOT, TRAIN, VALID

_MOVES = frozenset({"copy", "transpose", "copy-start"})
# `loopfeed.engine.crossing.token.Token`, which every crossing takes and returns first.
_TOKEN = "u8[]"
# What a fusion may contain, beside a copy or transpose, and still compute nothing.
_NOTHING = frozenset({"parameter", "constant", "bitcast", "reshape", "broadcast", "convert", "tuple", "slice"})


@dataclass(frozen=True)
class HostCall:
    """A call of the host in the program.

    Attributes:
        name: the instruction.
        scope: what it is for, such as "train/draw".
        target: what is called.
        when: how often: "each batch", "each pull", "at boundaries", "once", and ", if due" in a branch.
        bytes_to_host, bytes_from_host: what one call passes, without the token that orders the calls.
        source: the line of code that it comes from.
    """

    name: str
    scope: str
    target: str
    when: str
    bytes_to_host: int
    bytes_from_host: int
    source: Source | None


@dataclass(frozen=True)
class Fusions:
    """The fusions in the loops of a program.

    Attributes:
        count: their number.
        num_fused: the instructions in them.
        largest: the fusions with the most instructions: name, scope and their number.
        by_kind: their number by XLA's kind, such as "kLoop".
    """

    count: int
    num_fused: int
    largest: tuple[tuple[str, str, int], ...]
    by_kind: dict[str, int]


@dataclass(frozen=True)
class Move:
    """A copy or a transpose in the loops.

    Attributes:
        name: the instruction.
        kind: "copy" or "transpose".
        scope: where it belongs.
        shapes: the array.
        num_bytes: bytes that it reads and writes for a batch.
        source: the line of code that it comes from, None if XLA added it.
    """

    name: str
    kind: str
    scope: str
    shapes: str
    num_bytes: int
    source: Source | None


def find_host_calls(steps: Steps) -> tuple[HostCall, ...]:
    """Return the calls of the host, in the order of the text."""
    program = steps.program
    return tuple(
        HostCall(
            name=each.name,
            scope=steps.name_of(each),
            target=each.target,
            when=_when(steps, each),
            bytes_to_host=_passed_bytes([array for operand in program.operands_of(each) for array in operand.results]),
            bytes_from_host=_passed_bytes(each.results),
            source=steps.source_of(each),
        )
        for each in program.instructions.values()
        if each.opcode == "custom-call" and "callback" in each.target
    )


def _passed_bytes(arrays: Sequence[Array]) -> int:
    """Return the bytes of the arrays; the first is the token if it looks like one."""
    return sum(each.num_bytes for each in arrays[1 if str(arrays[0]) == _TOKEN else 0 :]) if arrays else 0


def find_fusions(steps: Steps, *, most: int = 5) -> Fusions:
    """Count the fusions in the loops.

    Args:
        steps: the program.
        most: how many of the largest to name.
    """
    fused = [
        kernel.instruction for kernel in steps.kernels if kernel.is_looped and kernel.instruction.opcode == "fusion"
    ]
    sizes = {
        each.name: sum(1 for inner in fused_into(steps.program, each) if inner.opcode != "parameter") for each in fused
    }
    largest = sorted(fused, key=lambda each: -sizes[each.name])[:most]
    return Fusions(
        count=len(fused),
        num_fused=sum(sizes.values()),
        largest=tuple((each.name, steps.name_of(each), sizes[each.name]) for each in largest),
        by_kind=dict(Counter(each.attribute("kind") for each in fused).most_common()),
    )


def find_moves(steps: Steps, *, least_bytes: int = 0) -> tuple[Move, ...]:
    """Return the copies and transposes of a batch, those that move most first; those of snapshots are left out.

    Args:
        steps: the program.
        least_bytes: leave out those that move fewer bytes for a batch.
    """
    found = []
    for kernel in steps.kernels:
        is_of_a_batch = kernel.is_looped and kernel.scope.action != SNAPSHOT
        kind = _kind_of_move(steps, kernel.instruction) if is_of_a_batch else None
        if kind is None:
            continue
        num_bytes = kernel.times * bytes_of(steps.program, kernel.instruction)
        if num_bytes >= least_bytes:
            each = kernel.instruction
            shapes = ", ".join(map(str, each.results[:1]))
            source = steps.source_of(each)
            found.append(Move(each.name, kind, steps.name_of(each), shapes, num_bytes, source))
    return tuple(sorted(found, key=lambda move: -move.num_bytes))


def _kind_of_move(steps: Steps, instruction: Instruction) -> str | None:
    opcodes = {each.opcode for each in fused_into(steps.program, instruction)}
    moves = opcodes & _MOVES
    if not moves or opcodes - moves - _NOTHING:
        return None
    return "transpose" if "transpose" in moves else "copy"


def _when(steps: Steps, instruction: Instruction) -> str:
    program = steps.program
    around = program.loops_around(instruction.computation)
    if not around:
        return "once"
    frames = [steps.frames_of(phase) for phase in (TRAIN, VALID)]
    batches = {loops[0].name for loops in frames if loops}
    # The outermost loop is that over segments, which end at boundaries; any others are those over pulls.
    boundaries = {loops[-1].name for loops in frames if len(loops) > 1}
    name = around[0].name
    when = "each batch" if name in batches else "at boundaries" if name in boundaries else "each pull"
    return f"{when}, if due" if _is_in_branch(steps, instruction, name) else when


def _is_in_branch(steps: Steps, instruction: Instruction, loop: str) -> bool:
    """Return whether a branch stands between an instruction and the loop around it."""
    program = steps.program
    computation = instruction.computation
    for _ in range(len(program.computations)):
        caller = program.instructions.get(program.caller_of.get(computation, ""))
        if caller is None or caller.name == loop:
            return False
        if caller.opcode == "conditional":
            return True
        computation = caller.computation
    return False
