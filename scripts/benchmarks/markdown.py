"""A run's JSON document as Markdown tables, for docs/benchmarks.md: `python -m scripts.benchmarks.markdown FILE…`."""

import json
from pathlib import Path
from typing import Any

import click

from scripts.benchmarks.bench import Unit
from scripts.benchmarks.hardware import short_commit
from scripts.benchmarks.measure import Quartiles
from scripts.benchmarks.report import (
    kept_text,
    load_text,
    number,
    processor_text,
    ratio_text,
    spread_text,
    target_text,
    versions_texts,
)


def tables(document: dict[str, Any]) -> str:
    """Return a description of the run's hardware and a table for each of its cases."""
    hardware = document["hardware"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        f"{document['date'][:10]}, commit {short_commit(document['commit'])}; {processor_text(hardware)}, "
        f"{hardware['cores']} cores, {hardware['system']}; {versions}; {document['settings']['repeats']} rounds.",
        "",
    ]
    for bench in document["benches"]:
        for case in bench["cases"]:
            lines += _table(bench["name"], case)
    return "\n".join(lines)


def _table(bench: str, case: dict[str, Any]) -> list[str]:
    unit = case["unit"]
    header = ["candidate", unit["text"], "spread", f"{case['base']} is", "target", "also"]
    load = load_text(case.get("load_before"), case.get("load_after"))
    lines = [f"### {bench}: {case['name']}{load}", "", _row(header), _row(["---", *["---:"] * 4, "---"])]
    lines += [_row(_cells(candidate, Unit(**unit))) for candidate in case["candidates"]]
    told = versions_texts([(each["name"], each["versions"]) for each in case["candidates"]])
    return [*lines, "", *([f"Versions: {'; '.join(told)}.", ""] if told else [])]


def _cells(candidate: dict[str, Any], unit: Unit) -> list[str]:
    found = (candidate["speed"], candidate["base_is_times_as_fast"], candidate.get("keeps_of_its_share"))
    speed, ratio, kept = (each and Quartiles(**each) for each in found)
    if speed is None:
        reason = (candidate["reason"] or "no reason was given").splitlines()[-1].strip()
        return [candidate["name"], "–", "", "", "", reason]
    return [
        candidate["name"],
        number(unit.shown(speed.median)),
        spread_text(speed),
        kept_text(kept) if kept else ratio_text(ratio),
        target_text(candidate["target"], candidate["is_met"]),
        ", ".join(f"{name} {number(value)}" for name, value in candidate["facts"].items()),
    ]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(files: tuple[Path, ...]) -> None:
    """Print the tables of FILES, as written by `scripts/bench --json`."""
    for file in files:
        click.echo(tables(json.loads(file.read_bytes())))


if __name__ == "__main__":
    main()
