"""What differs between the reports on two programs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loopfeed.engine.config import describe_value
from loopfeed.engine.inspection.report import ProgramReport


@dataclass(frozen=True)
class DifferentRow:
    """A row that differs between two reports.

    Attributes:
        group: what it belongs to, such as "settings", "work" or "memory".
        name: what it is.
        one, other: its values: numbers or text, None where it does not exist.
    """

    group: str
    name: str
    one: Any
    other: Any


def compare_reports(one: ProgramReport, other: ProgramReport) -> tuple[DifferentRow, ...]:
    """Return the rows of two reports that differ. Times of compilation and measured rates are left out."""
    found = []
    left, right = dict(_rows(one)), dict(_rows(other))
    for key in dict.fromkeys((*left, *right)):
        if left.get(key) != right.get(key):
            found.append(DifferentRow(*key, left.get(key), right.get(key)))
    order = list(dict.fromkeys(group for group, _ in (*left, *right)))
    return tuple(sorted(found, key=lambda row: order.index(row.group)))


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


def comparison_json(rows: tuple[DifferentRow, ...]) -> list[dict[str, Any]]:
    """Return the rows as values that JSON has."""
    return [{"group": row.group, "name": row.name, "one": row.one, "other": row.other} for row in rows]


def _rows(report: ProgramReport) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, value in report.settings.items():
        yield ("settings", name), value
    yield ("settings", "parameters"), report.num_params
    yield from _work(report)
    yield from _convolutions(report)
    for name, size in report.memory_bytes.items():
        yield ("memory", f"{name}, bytes"), size
    yield ("memory", "arrays at the peak, bytes"), report.peak.num_bytes
    yield ("carry", "leaves"), len(report.carry.leaves)
    yield ("carry", "bytes"), report.carry.num_bytes
    yield ("carry", "not donated"), sum(1 for leaf in report.carry.leaves if not leaf.is_donated)
    yield ("carry", "copied for each batch, bytes"), sum(leaf.copied_bytes for leaf in report.carry.leaves)
    yield ("program", "instructions"), report.num_instructions
    for kind, count in Counter(each.kind for each in report.findings).items():
        yield ("findings", kind), count


def _work(report: ProgramReport) -> Iterator[tuple[tuple[str, str], Any]]:
    rows = [*report.scopes, *(report.total(phase) for phase in ("train", "valid"))]
    for row in rows:
        name = row.name if row.action or row.phase not in ("train", "valid") else f"{row.name}, all"
        yield ("work", f"{name}, kernels"), row.num_kernels
        yield ("work", f"{name}, FLOP"), row.flops
        yield ("work", f"{name}, bytes"), row.num_bytes


def _convolutions(report: ProgramReport) -> Iterator[tuple[tuple[str, str], Any]]:
    found = report.traced.convolutions
    yield ("convolutions", "number"), report.traced.num_convolutions
    yield ("convolutions", "products of an image"), report.forward_products
    for form, count in Counter(each.form for each in found for _ in range(each.times)).items():
        yield ("convolutions", f"forward: {form}"), count


def _text(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
    return "-" if value is None else describe_value(value)
