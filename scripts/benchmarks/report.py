"""The results of a run: one JSON document, and its Markdown tables, `python -m scripts.benchmarks.report FILE…`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from loopfeed.engine.records.whole_file import write_whole
from scripts.benchmarks.bench import Bench, Settings, Unit
from scripts.benchmarks.hardware import (
    describe_environment,
    describe_hardware,
    describe_versions,
    git_commit,
    short_commit,
)
from scripts.benchmarks.peers import PEERS
from scripts.benchmarks.session import ROOT, CaseResult, Quartiles

FORMAT_VERSION = 1
_ALIGNED = ("<", ">", ">", ">", ">")


def describe_run(settings: Settings) -> dict[str, Any]:
    """Return the facts shared by all results of a run: date, commit, hardware, versions, settings."""
    chosen = asdict(settings)
    del chosen["folder"]
    return {
        "format_version": FORMAT_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(ROOT),
        "hardware": describe_hardware(),
        "versions": describe_versions(),
        "environment": describe_environment(),
        "settings": chosen | {"images": None if settings.images is None else str(settings.images)},
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


def heading(document: dict[str, Any]) -> str:
    """Return a line that describes the hardware, the software and the rounds of a run."""
    hardware, sets = document["hardware"], document["hardware"].get("instruction_sets")
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return (
        f"{document['date'][:10]}, commit {short_commit(document['commit'])}; {hardware['cpu']}"
        f"{f' ({", ".join(sets)})' if sets else ''}, {hardware['cores']} cores, {hardware['system']}; "
        f"{''.join(f'card {card}; ' for card in hardware['cards'])}{versions}; "
        f"{document['settings']['repeats']} rounds."
    )


def case_text(bench: str, case: dict[str, Any]) -> str:
    """Return the table of a case, as `session.CaseResult.to_json` gives it, and the versions below it."""
    unit, before, after = Unit(**case["unit"]), case.get("load_before"), case.get("load_after")
    load = f" (load {before[0]:g} before, {after[0]:g} at the end)" if before and after else ""
    rows = [["candidate", unit.text, "spread", f"{case['base']} is", "target", "also"]]
    rows += [_cells(candidate, unit) for candidate in case["candidates"]]
    first: dict[str, str] = {}
    for candidate in case["candidates"]:
        versions = ", ".join(f"{package} {version}" for package, version in candidate["versions"].items())
        first.setdefault(versions, candidate["name"])
    told = "; ".join(f"{name}: {versions}" for versions, name in first.items() if versions)
    return f"### {bench}: {case['name']}{load}\n\n{_table(rows)}\n" + (f"\nVersions: {told}.\n" if told else "")


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as a Markdown table, all columns but the last aligned; the first row is the head."""
    rows = [[cell.replace("|", "/") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    rules = [f"{'-' * (width - 1)}{':' if side == '>' else '-'}" for width, side in zip(widths, _ALIGNED, strict=True)]
    lines = []
    for row in (rows[0], [*rules, "---"], *rows[1:]):
        padded = [f"{cell:{side}{width}}" for cell, side, width in zip(row, _ALIGNED, widths, strict=False)]
        lines.append(f"| {' | '.join([*padded, row[-1]])} |")
    return "\n".join(lines)


def _cells(candidate: dict[str, Any], unit: Unit) -> list[str]:
    found = (candidate["speed"], candidate["base_is_times_as_fast"], candidate.get("keeps_of_its_share"))
    speed, ratio, kept = (each and Quartiles(**each) for each in found)
    if speed is None:
        reason = (candidate["reason"] or "no reason was given").splitlines()[-1].strip()
        return [candidate["name"], "–", "", "", "", reason]
    compared = ""
    if kept:
        compared = f"keeps {kept.median:.2f} [{kept.q1:.2f}–{kept.q3:.2f}] of its share"
    elif ratio:
        compared = f"{ratio.median:.2f} × [{ratio.q1:.2f}–{ratio.q3:.2f}]"
    target = candidate["target"]
    is_met = {True: "met", False: "missed", None: "?"}[candidate["is_met"]]
    # The facts of a candidate beside a neighbour are those that it has alone.
    facts = {} if candidate.get("beside_neighbour") else candidate["facts"]
    return [
        candidate["name"],
        number(unit.shown(speed.median)),
        f"±{100 * speed.spread:.1f} %",
        compared,
        "" if target is None else f"≥ {target:g} × {is_met}",
        ", ".join(f"{name} {number(value)}" for name, value in (facts | candidate.get("medians", {})).items()),
    ]


def number(value: object) -> str:
    """Return a number with about four digits, and anything else as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(files: tuple[Path, ...]) -> None:
    """Print the tables of FILES, as written by `scripts/bench --json`."""
    for file in files:
        document = json.loads(file.read_bytes())
        click.echo(f"{heading(document)}\n")
        for bench in document["benches"]:
            for case in bench["cases"]:
                click.echo(case_text(bench["name"], case))


if __name__ == "__main__":
    main()
