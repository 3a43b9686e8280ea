"""The body of the loop over batches as text, each instruction with the line of code that it comes from.

In StableHLO it is what jax asked for, in HLO what XLA made of it.
"""

import re
from collections.abc import Iterator
from typing import Any

from loopfeed.engine.hlo.program import Instruction, Source
from loopfeed.engine.inspection.steps import Steps, outside_layers, short_source
from loopfeed.engine.scopes import TRAIN

_PLACE = re.compile(r"\(([^()\"]+):(\d+):\d+(?: to [\d:]+)?\)")
_CALLED = re.compile(r"call @([\w$.\-]+)")
_LOOP = '/train/while"'
_INDENT = "  "


def hlo_lines(steps: Steps) -> list[str]:
    """Return the optimised body of the loop over training batches; what is fused stands indented below its fusion."""
    loop = steps.loop_of(TRAIN)
    return [] if loop is None else list(_computation_lines(steps, loop.called_as("body") or "", 0))


def _computation_lines(steps: Steps, name: str, depth: int) -> Iterator[str]:
    if depth > len(steps.program.computations):
        return
    for each in steps.program.instructions_of(name):
        yield _INDENT * depth + _instruction_line(steps, each)
        for role, callee in each.calls:
            # The functions that reductions apply to two numbers say nothing.
            if role != "to_apply" or each.opcode == "call":
                yield from _computation_lines(steps, callee, depth + 1)


def _instruction_line(steps: Steps, each: Instruction) -> str:
    results = ", ".join(map(str, each.results[:4])) + ", …" * (len(each.results) > 4)
    operands = ", ".join(f"%{name}" for name in each.operands[:8]) + ", …" * (len(each.operands) > 8)
    details = [
        f"{name}={value}"
        for name in ("dimensions", "window", "dim_labels", "lhs_contracting_dims", "custom_call_target", "index")
        if (value := each.attribute(name))
    ]
    text = f"{'ROOT ' * each.is_root}%{each.name} = {results} {each.opcode}({operands or each.literal})"
    about = f"  // {steps.name_of(each)} {short_source(steps.source_of(each))}" if each.op_name else ""
    return ", ".join([text, *details]) + about


def stablehlo_lines(module: Any) -> list[str]:
    """Return the loop over training batches, and the functions that it calls; nothing if there is no such loop.

    Args:
        module: a lowered program, as `jax.stages.Lowered.compiler_ir("stablehlo")`.
    """
    loops = (each for each in _operations(module.operation) if each.name == "stablehlo.while")
    loop = next((each for each in loops if _LOOP in str(each.location)), None)
    if loop is None:
        return []
    functions = {each.attributes["sym_name"].value: each for each in module.body.operations}
    parts, wanted = [_with_sources(loop)], [""]
    for name in wanted:  # which grows
        if name:
            parts.append(_with_sources(functions[name].operation))
        wanted += [each for each in _CALLED.findall("\n".join(parts[-1])) if each not in wanted and each in functions]
    return [line for part in parts for line in (*part, "")][:-1]


def _operations(operation: Any) -> Iterator[Any]:
    """Yield the operations inside an operation of MLIR, outer ones first."""
    for block in (block for region in operation.regions for block in region):
        for each in block.operations:
            yield each.operation
            yield from _operations(each.operation)


def _with_sources(operation: Any) -> list[str]:
    bare = operation.get_asm(use_local_scope=True).splitlines()
    placed = operation.get_asm(enable_debug_info=True, pretty_debug_info=True, use_local_scope=True)
    lines = []
    # A location has a line for each caller, which begins with "at".
    for line, about in zip(bare, placed.replace("\n at ", " at ").splitlines(), strict=True):
        source = outside_layers([Source(file, "", int(number)) for file, number in _PLACE.findall(about)])
        lines.append(line if source is None else f"{line}  // {short_source(source)}")
    return lines
