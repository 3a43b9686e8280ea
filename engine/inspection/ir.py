"""The body of the loop over batches as text, each instruction with the line of code that it comes from.

In StableHLO it is what jax asked for, in HLO what XLA made of it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from loopfeed.engine.hlo.program import Instruction, Source
from loopfeed.engine.inspection.steps import Steps, short_source
from loopfeed.engine.scopes import TRAIN

_LOCATION = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_USED = re.compile(r"\s*loc\((#loc\d*|unknown|callsite\([^()]*\))\)")
_REFERENCE = re.compile(r"#loc\d*")
_FILE = re.compile(r'^"((?:[^"\\]|\\.)*)":(\d+)')
_CALLED = re.compile(r"call @([\w$.\-]+)")
_LOOP = re.compile(r"(?:^|/)train/while$")
_LAYERS = "models/layers/"
_INDENT = "  "


def hlo_lines(steps: Steps) -> list[str]:
    """Return the optimised body of the loop over training batches; what is fused stands indented below its fusion."""
    loop = steps.loop_of(TRAIN)
    body = None if loop is None else loop.called_as("body")
    return [] if body is None else list(_computation_lines(steps, body, 0))


def stablehlo_lines(text: str) -> list[str]:
    """Return the body of the loop over training batches, and the functions that it calls.

    Args:
        text: a lowered program with its locations, as `jax.stages.Lowered.as_text(debug_info=True)`.
    """
    lines = text.splitlines()
    locations = {found[1]: found[2] for line in lines if (found := _LOCATION.match(line)) is not None}
    body = _loop_body(lines, locations)
    functions = _functions(lines)
    wanted, shown = _called_by(body), []
    while wanted:
        name = wanted.pop(0)
        if name in functions and name not in shown:
            shown.append(name)
            wanted += _called_by(functions[name])
    parts = [body, *(functions[name] for name in shown)]
    return [_with_source(line, locations) for part in parts for line in (*part, "")][:-1]


def _computation_lines(steps: Steps, name: str, depth: int) -> Iterator[str]:
    computation = steps.program.computations.get(name)
    if computation is None or depth > len(steps.program.computations):
        return
    for each in computation.instructions:
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


def _loop_body(lines: Sequence[str], locations: Mapping[str, str]) -> list[str]:
    """Return the lines of the loop over batches, from `stablehlo.while` to the end of its body."""
    for start, line in enumerate(lines):
        if " = stablehlo.while(" not in line and " = stablehlo.while " not in line:
            continue
        indent = len(line) - len(line.lstrip())
        for end in range(start + 1, len(lines)):
            closes = lines[end].startswith(" " * indent + "}") and "do {" not in lines[end]
            if closes:
                used = _USED.findall(lines[end]) or _USED.findall(line)
                if used and _LOOP.search(_name_of(used[-1], locations)):
                    return [each[indent:] for each in lines[start : end + 1]]
                break
    return []


def _functions(lines: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    name, start = "", 0
    for place, line in enumerate(lines):
        if (head := re.match(r"  func\.func (?:private |public )?@([\w$.\-]+)", line)) is not None:
            name, start = head[1], place
        elif line.startswith("  }") and name:
            found[name] = [each[2:] for each in lines[start : place + 1]]
            name = ""
    return found


def _called_by(lines: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in _CALLED.findall(line)))


def _with_source(line: str, locations: Mapping[str, str]) -> str:
    used = _USED.findall(line)
    if not used:
        return line
    bare = _USED.sub("", line)
    seen: set[str] = set()
    places = [place for name in _REFERENCE.findall(used[-1]) for place in _places(name, locations, seen)]
    source = next((each for each in places if _LAYERS not in each.file), places[0] if places else None)
    return bare if source is None else f"{bare}  // {short_source(source)}"


def _places(name: str, locations: Mapping[str, str], seen: set[str]) -> Iterator[Source]:
    """Yield the lines of code of a location, the innermost first."""
    if name in seen or name not in locations:
        return
    seen.add(name)
    text = locations[name]
    if (found := _FILE.match(text)) is not None:
        yield Source(found[1], "", int(found[2]))
        return
    for inner in _REFERENCE.findall(text):
        yield from _places(inner, locations, seen)


def _name_of(name: str, locations: Mapping[str, str]) -> str:
    """Return the scopes that a location names, such as "jit(train)/while"; empty if it names none."""
    found = re.match(r'^"((?:[^"\\]|\\.)*)"\(', locations.get(name, ""))
    return "" if found is None else found[1]
