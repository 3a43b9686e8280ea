"""The options of `run-train` that look into a run instead of training it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from loopfeed.engine.config import TrainConfig
from loopfeed.preprocess.commands.completion import complete_file
from loopfeed.preprocess.commands.sheet_path import check_sheet_path

if TYPE_CHECKING:
    from loopfeed.engine.run.parts import OwnParts

LOOK_OPTIONS = ("show_batch", "step_check")
"""The parameter names of these options."""

OPTIONS = (
    click.option(
        "--show-batch",
        type=click.Path(path_type=Path),
        metavar="FILE.png",
        shell_complete=complete_file,
        show_default="train",
        help="Write pictures of the first batch, after augmentation, as the devices got it, but do not train; with "
        "--resume, of the batch that the run would take next.",
    ),
    click.option(
        "--step-check",
        is_flag=True,
        help="Make the next step in the compiled program and operation by operation, and print where they differ, but "
        "do not train.",
    ),
)


def check_look_options(params: Mapping[str, Any]) -> None:
    """Raise ValueError if two options that replace training are given, or the pictures cannot be written."""
    given = [f"--{name.replace('_', '-')}" for name in ("dry_run", *LOOK_OPTIONS) if params[name]]
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]} both replace the training: give one of them")
    if given and params["requeue"]:
        raise ValueError(f"--requeue continues a training, and {given[0]} does not train: leave one out")
    for name in ("spawn", "coordinator"):
        if params["step_check"] and params[name] is not None:
            raise ValueError(f"--step-check runs in one process, got --{name}: leave it out")
    if params["show_batch"] is not None:
        check_sheet_path(params["show_batch"])


def is_look(params: Mapping[str, Any]) -> bool:
    """Return whether one of these options is given."""
    return any(params[name] for name in LOOK_OPTIONS)


def look(config: TrainConfig, parts: "OwnParts", params: Mapping[str, Any]) -> bool:
    """Do what the given option says, and print it; return whether nothing is wrong."""
    from loopfeed.engine.crossing.devices import split_processor

    # Before the modules that use jax are imported.
    split_processor([config])
    if params["step_check"]:
        return _check_step(config, parts)
    _show_batch(config, parts, params["show_batch"])
    return True


def _show_batch(config: TrainConfig, parts: "OwnParts", path: Path) -> None:
    from loopfeed.engine.processes import this_process
    from loopfeed.engine.run.open_run import open_run
    from loopfeed.engine.run.show_batch import first_batch_of

    is_first = this_process().index == 0
    with open_run(config, parts, click.echo if is_first else lambda _: None, is_dry=True) as run:
        shown = first_batch_of(run.launch)
    if is_first:
        shown.save(path)
        click.echo(f"wrote {path}: {shown.facts} of step {shown.step:,}")


def _check_step(config: TrainConfig, parts: "OwnParts") -> bool:
    from loopfeed.engine.commands.step_report import report_lines
    from loopfeed.engine.run.step_check import check_step_of

    check = check_step_of(config, parts, click.echo)
    click.echo("\n".join(["", *report_lines(check)]))
    return check.is_right
