"""What differs between the reports on two programs."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from loopfeed.engine.config import describe_value
from loopfeed.engine.inspection.report import ProgramReport


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
