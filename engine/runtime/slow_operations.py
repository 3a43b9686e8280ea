"""The operations of a compiled program that run without a fast kernel, by name."""

from collections import Counter
from collections.abc import Iterator

from loopfeed.engine.hlo.program import HloProgram, Instruction
from loopfeed.engine.hlo.text import parse_hlo
from loopfeed.engine.hlo.work import naive_reason, products_of
from loopfeed.engine.runtime.record import SlowOperation
from loopfeed.engine.scopes import parse_op_name

# Smaller ones take less time than it takes to begin them.
_LEAST_PRODUCTS = 1 << 16
_LEAST_SORTED = 1 << 12
_KINDS = {"convolution": "convolution", "dot": "product", "sort": "sort", "copy-start": "host copy"}


def find_slow_operations(text: str, *, is_cpu: bool) -> tuple[SlowOperation, ...]:
    """Return the slow operations in the loops of a program, the most frequent first.

    On a CPU these are convolutions and matrix products that XLA compiles to plain loops instead of calling a library or
    fusing them; on a card sorts that are not those of a library, and copies between its memory and the host's.

    Args:
        text: the text of the optimised program, as `jax.stages.Compiled.as_text()` returns it.
        is_cpu: whether it runs on a CPU.
    """
    program, found = parse_hlo(text), Counter[SlowOperation]()
    for each in _in_loops(program):
        why = _naive(program, each) if is_cpu else _slow_on_card(program, each)
        if why is not None:
            shape = str(each.results[0]) if each.results else ""
            scope = parse_op_name(program.op_name_of(each))
            name = "/".join(part for part in (scope.phase, scope.action, scope.path) if part)
            found[SlowOperation(_KINDS[each.opcode], name or each.name, shape, why)] += 1
    return tuple(
        SlowOperation(each.kind, each.name, each.shape, each.why, count) for each, count in found.most_common()
    )


def _in_loops(program: HloProgram) -> Iterator[Instruction]:
    """Yield the instructions inside loops, without those that a library computes as a part of a fusion."""
    if program.entry is None:
        return
    counts: dict[str, bool] = {}
    for each in program.within(program.entry.name, fused=True):
        computation = each.computation
        if computation not in counts:
            caller = program.instructions.get(program.caller_of.get(computation, ""))
            is_of_library = caller is not None and caller.attribute("kind") == "kCustom"
            counts[computation] = not is_of_library and bool(program.loops_around(computation))
        if counts[computation] and each.opcode in _KINDS:
            yield each


def _naive(program: HloProgram, instruction: Instruction) -> str | None:
    reason = naive_reason(program, instruction)
    if reason is None or products_of(program, instruction) < _LEAST_PRODUCTS:
        return None
    remedy = (
        "; use loopfeed.convolution or loopfeed.conv_general_dilated" if instruction.opcode == "convolution" else ""
    )
    return f"a plain loop, because {reason}{remedy}"


def _slow_on_card(program: HloProgram, instruction: Instruction) -> str | None:
    operands = program.operands_of(instruction)
    if instruction.opcode == "sort" and operands and operands[0].results[0].size >= _LEAST_SORTED:
        return "sorted in many passes, by no kernel of a library"
    return "copied between the card's memory and the host's" if instruction.opcode == "copy-start" else None
