"""Results as tables, one per case, and as one JSON document per run."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loopfeed.engine.records.whole_file import write_whole
from scripts.benchmarks.bench import Bench, Settings
from scripts.benchmarks.hardware import (
    describe_environment,
    describe_hardware,
    describe_versions,
    git_commit,
    short_commit,
)
from scripts.benchmarks.measure import Quartiles
from scripts.benchmarks.peers import PEERS
from scripts.benchmarks.session import ROOT, CaseResult, Row

FORMAT_VERSION = 1


def describe_run(settings: Settings) -> dict[str, Any]:
    """Return the facts shared by all results of a run: date, commit, hardware, versions, settings."""
    return {
        "format_version": FORMAT_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(ROOT),
        "hardware": describe_hardware(),
        "versions": describe_versions(),
        "environment": describe_environment(),
        "settings": {
            "repeats": settings.repeats,
            "peers": settings.peers,
            "case": settings.case,
            "round_s": settings.round_s,
            "limit_s": settings.limit_s,
            "images": None if settings.images is None else str(settings.images),
        },
    }


def write_json(path: Path, about: dict[str, Any], results: Sequence[tuple[Bench, CaseResult]]) -> None:
    """Write the results of a run atomically.

    Raises:
        OSError: the file cannot be written.
    """
    benches: dict[str, list[Any]] = {}
    for bench, result in results:
        benches.setdefault(bench.name, []).append(result.to_json())
    peers = {row.candidate.peer for _, result in results for row in result.rows if row.candidate.peer}
    about = about | {
        "peers": {name: {"what": PEERS[name].what, "pins": PEERS[name].requirements} for name in sorted(peers)},
        "benches": [{"name": name, "cases": cases} for name, cases in benches.items()],
    }
    write_whole(path, (json.dumps(about, indent=1, ensure_ascii=False) + "\n").encode())


def print_about(console: Console, about: dict[str, Any]) -> None:
    """Print the hardware and software of the run."""
    hardware, memory = about["hardware"], about["hardware"]["memory_bytes"]
    console.print(
        f"{processor_text(hardware)}, {hardware['cores']} cores, {f'{memory / 2**30:.0f} GiB, ' if memory else ''}"
        f"{hardware['system']}; load {hardware['load_average']}",
        *(f"card {card}" for card in hardware["cards"]),
        style="dim",
        highlight=False,
    )
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    console.print(
        f"{versions}; commit {short_commit(about['commit'])}; {about['settings']['repeats']} rounds",
        style="dim",
        highlight=False,
    )


def print_case(console: Console, bench: Bench, result: CaseResult) -> None:
    """Print a case as a table, then the reasons why candidates failed."""
    case = result.case
    plain = not console.is_terminal
    title = f"{bench.name}: {case.name}{load_text(result.load_before, result.load_after)}"
    table = Table(title=title, title_justify="left", box=box.ASCII2 if plain else box.SIMPLE)
    table.add_column("candidate", no_wrap=True)
    for column in (case.unit.text, "spread", f"{case.base} is", "target"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("also", overflow="fold")
    for row in result.rows:
        table.add_row(*_cells(row, result))
    console.print(table)
    for text in versions_texts([(row.candidate.name, row.ready.versions) for row in result.rows if row.ready]):
        console.print(text, style="dim", highlight=False)
    for row in result.rows:
        if row.measured.reason:
            console.print(Text(f"{row.candidate.name}: {row.measured.reason}"))
        if row.differs:
            console.print(Text(f"{row.candidate.name}: does different work than {case.base}: {row.differs}"))


def _cells(row: Row, result: CaseResult) -> list[str]:
    name = row.candidate.name
    if row.speed is None:
        return [name, "–", "", "", "", "failed, see below"]
    speed = result.case.unit.shown(row.speed.median)
    facts = row.ready.facts if row.ready else {}
    # Facts that must agree with the base are reported only if they differ; those of a candidate alone only there.
    is_reported = {key for key in facts if key not in result.case.agree and not row.candidate.beside}
    reported = {key: value for key, value in facts.items() if key in is_reported} | row.values()
    return [
        name,
        number(speed),
        spread_text(row.speed),
        kept_text(row.kept) if row.candidate.beside else ratio_text(row.ratio),
        target_text(row.candidate.target, row.is_met),
        ", ".join(f"{key} {number(value)}" for key, value in reported.items()),
    ]


def processor_text(hardware: dict[str, Any]) -> str:
    """Return the processor's name and its instruction sets, which earlier documents do not tell."""
    sets = hardware.get("instruction_sets")
    return f"{hardware['cpu']} ({', '.join(sets)})" if sets else str(hardware["cpu"])


def load_text(before: list[float] | None, after: list[float] | None) -> str:
    """Return the load of the minute before a case and of its last minute, as an addition to its name."""
    return f" (load {before[0]:g} before, {after[0]:g} at the end)" if before and after else ""


def versions_texts(candidates: Sequence[tuple[str, dict[str, str]]]) -> list[str]:
    """Return a line for each set of versions that candidates have, with the name of the first that has it."""
    first: dict[str, str] = {}
    for name, versions in candidates:
        first.setdefault(", ".join(f"{package} {version}" for package, version in versions.items()), name)
    return [f"{name}: {versions}" for versions, name in first.items() if versions]


def spread_text(speed: Quartiles) -> str:
    """Return the text of a spread."""
    return f"±{100 * speed.spread:.1f} %"


def ratio_text(ratio: Quartiles | None) -> str:
    """Return the text of a ratio."""
    return "" if ratio is None else f"{ratio.median:.2f} × [{ratio.q1:.2f}–{ratio.q3:.2f}]"


def kept_text(kept: Quartiles | None) -> str:
    """Return the text of what a candidate keeps of its share of the cores."""
    return "" if kept is None else f"keeps {kept.median:.2f} [{kept.q1:.2f}–{kept.q3:.2f}] of its share"


def target_text(target: float | None, is_met: bool | None) -> str:
    """Return the text of a target and whether it is met."""
    if target is None:
        return ""
    return f"≥ {target:g} × {({True: 'met', False: 'missed', None: '?'})[is_met]}"


def number(value: object) -> str:
    """Return a number with about four digits, and anything else as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
