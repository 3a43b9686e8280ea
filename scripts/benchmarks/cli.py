"""The command behind scripts/bench."""

import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click

from scripts.benchmarks.bench import Bench, Settings
from scripts.benchmarks.cases import BENCHES, CARD, REHEARSAL
from scripts.benchmarks.report import case_text, describe_run, heading, write_json
from scripts.benchmarks.session import ROOT, CaseResult, run_case

FOLDER = ROOT / ".bench"


@click.command()
@click.argument("names", nargs=-1, metavar="NAME…")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write every sample to this file."
)
@click.option("--peers", is_flag=True, help="Measure other projects too, each in an environment created on demand.")
@click.option("--repeats", type=click.IntRange(1, 1000), default=7, show_default=True, help="Rounds of each case.")
@click.option("--case", default="", metavar="SUBSTRING", help="Measure only cases whose name contains SUBSTRING.")
@click.option("--round-s", type=click.FloatRange(0, min_open=True), help="Seconds per candidate and round.")
@click.option(
    "--limit-s", type=click.FloatRange(0, min_open=True), help="Seconds for everything; what does not fit is left out."
)
@click.option("--images", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Class folders of JPEGs.")
def main(
    names: tuple[str, ...],
    json_path: Path | None,
    peers: bool,
    repeats: int,
    case: str,
    round_s: float | None,
    limit_s: float | None,
    images: Path | None,
) -> None:
    """Run the benchmarks NAME… ("all": every one except those of a card); without NAME, list them."""
    until = time.monotonic() + (limit_s or math.inf)
    if not names:
        for bench in BENCHES:
            click.echo(f"{bench.name:16}{bench.summary}")
        return
    signal.signal(signal.SIGTERM, _end)  # so that SIGTERM unwinds the stack too, and the candidates are killed
    FOLDER.mkdir(exist_ok=True)
    pictures = None if images is None else images.absolute()
    settings = Settings(FOLDER, pictures, peers, repeats, case, round_s, limit_s)
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise click.UsageError(f"--json must name a file in an existing folder, got {json_path}")
    benches = _chosen(names)
    try:
        cases = [(bench, each) for bench in benches for each in bench.chosen_cases(settings)]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    about, results = describe_run(settings), list[tuple[Bench, CaseResult]]()
    click.echo(f"{heading(about)}\n")
    for bench, each in cases:
        result = run_case(each, settings, say=_say, until=until)
        click.echo(case_text(bench.name, result.to_json()))
        click.echo("\n".join(result.complaints()))
        results.append((bench, result))
        # After each case, so that the results of a long run are not lost if it is stopped.
        if json_path is not None:
            write_json(json_path, about, results)
    failed = [f"{bench.name}, {result.case.name}" for bench, result in results if not result.has_base]
    if failed:
        raise click.ClickException(f"the base candidate failed in {'; '.join(failed)}; see the reason below the table")


def _chosen(names: tuple[str, ...]) -> list[Bench]:
    known = {bench.name: bench for bench in BENCHES}
    if "all" in names:
        return [bench for bench in BENCHES if bench not in (CARD, REHEARSAL)]
    for name in names:
        if name not in known:
            raise click.UsageError(f"NAME must be one of {', '.join(known)} or all, got {name!r}")
    return [known[name] for name in dict.fromkeys(names)]


def _say(text: str) -> None:
    click.echo(text, err=True)


def _end(*_: Any) -> None:
    sys.exit(128 + signal.SIGTERM)
