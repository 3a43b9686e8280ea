"""The report on a compiled program, and the difference of two, as lines of text, at most 80 wide except for names.

Also the body of the loop over batches as text, each instruction with the line of code that it comes from: in StableHLO
it is what jax asked for, in HLO what XLA made of it.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from loopfeed.engine.config import describe_value
from loopfeed.engine.hlo.program import Instruction, Source
from loopfeed.engine.inspection.convolutions import Convolution
from loopfeed.engine.inspection.report import Finding, ProgramReport
from loopfeed.engine.inspection.steps import Steps, outside_layers, short_source
from loopfeed.engine.inspection.work_by_scope import LOOPS, ONCE, ScopeWork
from loopfeed.engine.scopes import TRAIN
from loopfeed.preprocess.quantities import quantity

_WIDTH = 80
_OUTSIDE = {LOOPS: "in the loops, of no scope", ONCE: "once, outside of the loops"}


def report_lines(report: ProgramReport, *, most: int = 10) -> list[str]:
    """Return the lines of a report.

    Args:
        report: the report.
        most: how many convolutions, arrays, leaves, copies and places of a finding to list.
    """
    parts = (
        _head_lines(report),
        _work_lines(report),
        _convolution_lines(report, most),
        _memory_lines(report, most),
        _carry_lines(report, most),
        _finding_lines(report.findings, most),
    )
    return [line for part in parts for line in (*part, "")][:-1]


def _head_lines(report: ProgramReport) -> Iterator[str]:
    height, width = report.image_size
    each = f" on each of {report.num_devices} devices" if report.num_devices > 1 else ""
    kernels = f", kernels {report.settings['kernels']}" if report.platform == "cpu" else ""
    yield f"{report.model}, {quantity(report.num_params, 'parameter')}, on {report.device}"
    yield f"  batch {report.batch:,}{each}, {height} × {width} px, {report.settings['precision']}{kernels}"
    origin = "loaded from the cache" if report.from_cache else f"compiled in {report.compile_s:.1f} s"
    yield f"  program of {quantity(report.num_instructions, 'instruction')}, {origin}"
    if report.rates is not None:
        rates = report.rates
        yield (
            f"  measured: {rates.flops_per_s / 1e9:,.0f} GFLOP/s ({rates.dtype}), {rates.bytes_per_s / 1e9:,.1f} GB/s; "
            f"equal at {rates.ridge:,.0f} FLOP/B"
        )


def _work_lines(report: ProgramReport) -> Iterator[str]:
    yield f"{'work of a batch':<28}{'kernels':>7}{'GFLOP':>9}{'MB':>10}{'FLOP/B':>7}{'ms ≈':>8} bound by"
    for phase, rows in groupby(report.scopes, key=lambda row: row.phase):
        if phase in _OUTSIDE:
            for row in rows:
                yield _work_line(_OUTSIDE[phase], row)
            continue
        yield phase
        for row in rows:
            yield _work_line(f"  {row.action or 'no action'} {row.stage}", row)
        yield _work_line("  all, without snapshots" if phase == "train" else "  all", report.total(phase))


def _work_line(name: str, row: ScopeWork) -> str:
    milliseconds = 1e3 * (row.seconds or 0.0)
    least = "-" if row.seconds is None else f"{milliseconds:,.{2 if milliseconds < 1000 else 1}f}"
    return (
        f"{_shortened(name, 28):<28}{row.num_kernels:>7,}{row.flops / 1e9:>9,.3f}{row.num_bytes / 1e6:>10,.2f}"
        f"{row.intensity:>7,.1f}{least:>8} {row.bound}"
    ).rstrip()


def _convolution_lines(report: ProgramReport, most: int) -> Iterator[str]:
    convolutions, products = report.traced.convolutions, report.forward_products
    of_convolutions = report.traced.convolution_products / report.batch
    share = of_convolutions / products if products else 0.0
    yield from _wrapped(
        f"{quantity(report.traced.num_convolutions, 'convolution')}: "
        f"{of_convolutions / 1e6:,.1f} of {products / 1e6:,.1f} million "
        f"multiply-accumulates of an image ({share:.1%})",
        "  ",
    )
    if report.known_products is not None:
        agrees = "as" if report.known_products == round(products) else f"but {report.known_products / 1e6:,.1f} million"
        yield f"  {agrees} the model's description has"
    if not convolutions:
        return
    yield f"  {report.convolution_share:.1%} of the operations of a training batch, forward and backward"
    yield f"  {'convolution':<24}{'kernel':>7}{'channels':>12}{'px':>8}{'million':>8}  forward"
    largest = sorted(convolutions, key=lambda each: -each.times * each.products)[:most]
    for each in largest:
        yield _convolution_line(each, report.batch)
    if len(convolutions) > most:
        yield f"  … {len(convolutions) - most} more"
    yield from _form_lines(convolutions)


def _convolution_line(each: Convolution, batch: int) -> str:
    size = "×".join(map(str, each.kernel_shape[:-2]))
    stride = "" if set(each.strides) == {1} else f"/{each.strides[0]}"
    channels = f"{each.x_shape[-1]}→{each.y_shape[-1]}" + (f" ÷{each.groups}" if each.groups > 1 else "")
    name = (f"{each.times} × " if each.times > 1 else "") + (each.scope or short_source(each.source))
    return (
        f"  {_shortened(name, 23):<24}{size + stride:>7}{channels:>12}{'×'.join(map(str, each.x_shape[1:-1])):>8}"
        f"{each.times * each.products / batch / 1e6:>8,.1f}  {each.form.partition(',')[0]}"
    )


def _form_lines(convolutions: Sequence[Convolution]) -> Iterator[str]:
    """Yield how many convolutions take each form, part by part, and why."""
    for number, part in enumerate(("forward", "input gradient", "filter gradient")):
        counts: dict[tuple[str, str], int] = {}
        for each in convolutions:
            if each.forms:
                key = each.forms[number].form, each.forms[number].reason
                counts[key] = counts.get(key, 0) + each.times
        for (form, reason), count in sorted(counts.items(), key=lambda item: -item[1]):
            yield from _wrapped(f"  {part}: {count} × {form}: {reason}", "    ")
    if count := sum(each.times for each in convolutions if each.is_lax):
        yield f"  {count} × jax.lax.conv_general_dilated, called by the model itself"


def _memory_lines(report: ProgramReport, most: int) -> Iterator[str]:
    yield "memory of the program by XLA, MB"
    named = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in report.memory_bytes.items())
    yield f"  {named or 'not known'}"
    if report.arrays:
        yield f"  {'MB':>8}  {'largest arrays of a batch':<26}made by"
    for each in report.arrays[:most]:
        made_by = _shortened(each.made_by.removeprefix("train/"), 40)
        yield f"  {each.num_bytes / 1e6:>8,.2f}  {_shortened(str(each.array), 25):<26}{made_by}"


def _carry_lines(report: ProgramReport, most: int) -> Iterator[str]:
    carry = report.carry
    num_bytes, kept = sum(leaf.num_bytes for leaf in carry), sum(1 for leaf in carry if leaf.is_donated)
    yield f"carry of the loop: a state of {len(carry):,} leaves, {num_bytes / 1e6:,.1f} MB; {kept} donated"
    for leaf in sorted(carry, key=lambda leaf: -leaf.num_bytes)[:most]:
        shape, note = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]", "" if leaf.is_donated else "not donated"
        yield f"  {leaf.num_bytes / 1e6:>8,.2f}  {shape:<22}{_shortened(leaf.name, 36):<37}{note}".rstrip()
    if len(carry) > most:
        yield f"  … {len(carry) - most} more"


def _finding_lines(findings: Sequence[Finding], most: int) -> Iterator[str]:
    if not findings:
        yield "nothing suboptimal was found"
        return
    yield f"{quantity(len(findings), 'finding')}"
    kinds = list(dict.fromkeys((each.kind, each.message) for each in findings))
    for kind, message in kinds:
        own = [each for each in findings if (each.kind, each.message) == (kind, message)]
        yield from _wrapped(f"  {kind}: {message}", "    ")
        for each in own[:most]:
            size = f", {each.num_bytes / 1e6:,.1f} MB" if each.num_bytes else ""
            yield f"    {each.scope} ({short_source(each.source)}{size})"
        if len(own) > most:
            yield f"    … {len(own) - most} more"


def _shortened(text: str, width: int) -> str:
    """Return a text of at most `width` characters, of a longer one the end."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def _wrapped(text: str, indent: str) -> list[str]:
    """Return a text as lines of at most the width; those after the first begin with `indent`."""
    start = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(text.strip(), _WIDTH, initial_indent=start, subsequent_indent=indent, break_long_words=False)


class DifferentRow(NamedTuple):
    """A row that differs between two reports: its group, such as "work", its name, and both values, None without one.

    Values are numbers or text.
    """

    group: str
    name: str
    one: Any
    other: Any


def compare_reports(one: ProgramReport, other: ProgramReport) -> tuple[DifferentRow, ...]:
    """Return the rows of two reports that differ. Times of compilation and measured rates are left out."""
    left, right = dict(_rows(one)), dict(_rows(other))
    keys = [key for key in dict.fromkeys((*left, *right)) if left.get(key) != right.get(key)]
    order = list(dict.fromkeys(group for group, _ in (*left, *right)))
    keys.sort(key=lambda key: order.index(key[0]))
    return tuple(DifferentRow(*key, left.get(key), right.get(key)) for key in keys)


def comparison_lines(rows: tuple[DifferentRow, ...], names: tuple[str, str]) -> list[str]:
    """Return the rows of a comparison as lines, at most 80 characters wide except for names.

    Args:
        rows: the rows.
        names: what the two programs are called.
    """
    if not rows:
        return ["the two programs do not differ in anything that is counted"]
    lines = [f"A  {names[0]}", f"B  {names[1]}", "", f"{'':<42}{'A':>18}{'B':>19}"]
    group = ""
    for row in rows:
        if row.group != group:
            group = row.group
            lines.append(group)
        lines.append(f"  {row.name:<40}{_text(row.one):>18}{_text(row.other):>19}")
    lines.append("everything else that is counted is equal")
    return lines


def _rows(report: ProgramReport) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, value in report.settings.items():
        yield ("settings", name), value
    yield ("settings", "parameters"), report.num_params
    for row in [*report.scopes, *(report.total(phase) for phase in ("train", "valid"))]:
        name = row.name if row.action or row.phase not in ("train", "valid") else f"{row.name}, all"
        for what, count in (("kernels", row.num_kernels), ("FLOP", row.flops), ("bytes", row.num_bytes)):
            yield ("work", f"{name}, {what}"), count
    yield ("convolutions", "number"), report.traced.num_convolutions
    yield ("convolutions", "products of an image"), report.forward_products
    forms = (each.form for each in report.traced.convolutions for _ in range(each.times))
    for form, count in Counter(forms).items():
        yield ("convolutions", f"forward: {form}"), count
    for name, size in report.memory_bytes.items():
        yield ("memory", f"{name}, bytes"), size
    yield ("carry", "leaves"), len(report.carry)
    yield ("carry", "bytes"), sum(leaf.num_bytes for leaf in report.carry)
    yield ("carry", "not donated"), sum(1 for leaf in report.carry if not leaf.is_donated)
    yield ("program", "instructions"), report.num_instructions
    for kind, count in Counter(each.kind for each in report.findings).items():
        yield ("findings", kind), count


def _text(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
    return "-" if value is None else describe_value(value)


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
