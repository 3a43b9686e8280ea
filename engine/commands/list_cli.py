"""The `list-runs` command, which lists the runs in a folder or a store with what they do and how they differ.

What loads numpy or the settings is imported where it is first needed, so that `--help` answers at once.
"""

import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loopfeed.preprocess.commands.completion import complete_folder
from loopfeed.preprocess.commands.guarded_output import GuardedCommand, write_data
from loopfeed.preprocess.commands.storage import storage_option
from loopfeed.preprocess.printable import printable_line
from loopfeed.preprocess.storage_options import is_url, parse_pairs
from loopfeed.preprocess.system_errors import reading_remedy, status_of

if TYPE_CHECKING:
    from loopfeed.engine.records.run_summary import RunSummary


class _WrongFolderError(click.ClickException):
    exit_code = 2


# Click keeps the line breaks of a paragraph that begins with a backspace.
_EPILOG = """\b
States:
  starting   it compiles
  running    it trains
  done       all steps are done, or the accuracy to reach is reached
  stopped    by a signal, control-run or a callback; it can be resumed
  failed     it ended with an error
  killed     its process died, or an unlocked run is silent for 10 minutes
  damaged    files cannot be read
  foreign    its config.json is not that of a run
"""


@click.command(cls=GuardedCommand, epilog=_EPILOG)
@click.argument("folder", metavar="[DIR]", default="runs", shell_complete=complete_folder)
@click.option(
    "--sort",
    "order",
    type=click.Choice(("changed", "started", "duration", "best", "last")),
    default="changed",
    show_default=True,
    help="What the table is sorted by; the newest, longest or best run stands at the end.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything known of each run as one line of JSON.")
@storage_option
def main(folder: str, order: str, as_json: bool, storage_option: tuple[str, ...]) -> None:
    """List the runs in the folder DIR ("runs" by default) and below, by default the one that changed last at the end.

    Shows the state of each run, its step, last loss, best and last evaluation and speed, how long it has trained, when
    it changed last, and the settings in which the listed runs differ. Evaluations are compared by the --keep-best of
    each run, else by top-1, else by the loss. The speed is the median of 64 steps. On a
    terminal, columns that do not fit are left out. Of runs that are done and differ in their seed alone, a line
    below gives the mean and the sample standard deviation.

    DIR may be the URL of runs in an object store.

    Exit codes: 0 listed, 1 the store failed, 2 DIR cannot be read.
    """
    now_s = time.time()
    notes: list[str] = []
    try:
        if is_url(folder):
            from loopfeed.engine.records.run_search import summarise_stored_runs

            runs = list(summarise_stored_runs(folder, now_s, parse_pairs(storage_option)))
        else:
            runs = _local_runs(Path(folder), now_s, notes)
    except ValueError as error:  # the store
        raise click.ClickException(printable_line(str(error))) from error
    except OSError as error:
        remedy = reading_remedy(error, "check the path")
        where = error.filename or folder
        reason = f"DIR must be a folder that can be read, but {where} is not: {error.strerror}; {remedy}"
        raise _WrongFolderError(printable_line(reason)) from error
    for note in notes:
        click.echo(printable_line(note), err=True)
    runs.sort(key=lambda run: _rank(run, order))
    if as_json:
        write_data(_json(runs))
    elif runs:
        _print_table(runs, folder, now_s)
    if not runs:
        click.echo(printable_line(f"there are no runs in {folder}"), err=True)


def _local_runs(folder: Path, now_s: float, notes: list[str]) -> "list[RunSummary]":
    from loopfeed.engine.records.run_search import find_runs
    from loopfeed.engine.records.run_summary import summarise_run

    if not folder.is_dir():
        found = "does not exist" if status_of(folder) is None else "is a file"
        raise _WrongFolderError(printable_line(f"DIR must be a folder that contains runs, but {folder} {found}"))
    return [summarise_run(run, now_s) for run in find_runs(folder, notes.append)]


def _rank(run: "RunSummary", order: str) -> tuple[str, float]:
    """Return what a run is sorted by; runs without the number come first, and those of other metrics by themselves."""
    from loopfeed.engine.objective.best_metric import parse_metric

    if order not in ("best", "last"):
        found = {"changed": run.changed_s, "started": run.started_s, "duration": run.duration_s}[order]
        return "", -math.inf if found is None else found
    value = run.best_value if order == "best" else run.last_value
    if value is None or run.best_metric is None:
        return "", -math.inf
    return run.best_metric, value if parse_metric(run.best_metric).is_larger_better else -value


def _json(runs: "list[RunSummary]") -> str:
    from loopfeed.engine.commands.seed_groups import group_by_seed

    over_seeds = {index: group.to_json() for group in group_by_seed(runs) for index in group.members}
    lines = [run.to_json() | {"over_seeds": over_seeds.get(index)} for index, run in enumerate(runs)]
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


def _print_table(runs: "list[RunSummary]", folder: str, now_s: float) -> None:
    from loopfeed.engine.commands.run_table import table_lines
    from loopfeed.engine.commands.seed_groups import group_by_seed, group_line
    from loopfeed.engine.runtime.report import wrap_words

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    names = [_name_in(run.run, folder) for run in runs]
    click.echo("\n".join(table_lines(runs, names, now_s, width)))
    for group in group_by_seed(runs):
        line = group_line(group, names)
        click.echo(line if width is None else wrap_words(line, width))
    for run, name in zip(runs, names, strict=True):
        if run.fault is not None:
            click.echo(printable_line(f"{name}: {run.fault}"), err=True)


def _name_in(run: str, folder: str) -> str:
    """Return the path of a run relative to the folder, or its last part if it is the folder itself."""
    names = (folder.rstrip("/"), str(Path(folder)))
    if run.rstrip("/") in names:
        return printable_line(run.rstrip("/").rpartition("/")[2] or run)
    for name in names:
        run = run.removeprefix(f"{name}/")
    return printable_line(run)
