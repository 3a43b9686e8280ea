"""The options of `run-train` that look into a run instead of training it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.config import TrainConfig
from preprocess.commands.completion import complete_file
from preprocess.commands.sheet_path import check_sheet_path

if TYPE_CHECKING:
    from engine.run.parts import OwnParts

LOOK_OPTIONS = ("show_batch",)
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
)


def check_look_options(params: Mapping[str, Any]) -> None:
    """Raise ValueError if two options that replace training are given, or the pictures cannot be written."""
    given = [f"--{name.replace('_', '-')}" for name in ("dry_run", *LOOK_OPTIONS) if params[name]]
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]} both replace the training: give one of them")
    if given and params["requeue"]:
        raise ValueError(f"--requeue continues a training, and {given[0]} does not train: leave one out")
    if params["show_batch"] is not None:
        check_sheet_path(params["show_batch"])


def is_look(params: Mapping[str, Any]) -> bool:
    """Return whether one of these options is given."""
    return any(params[name] for name in LOOK_OPTIONS)


def look(config: TrainConfig, parts: "OwnParts", params: Mapping[str, Any]) -> None:
    """Do what the given option says, and print it."""
    from engine.crossing.devices import split_processor
    from engine.processes import this_process

    # Before the modules that use jax are imported.
    split_processor([config])
    from engine.run.open_run import open_run

    is_first = this_process().index == 0
    with open_run(config, parts, click.echo if is_first else lambda _: None, is_dry=True) as run:
        from engine.run.show_batch import first_batch_of

        shown = first_batch_of(run.launch)
        if is_first:
            shown.save(params["show_batch"])
            click.echo(f"wrote {params['show_batch']}: {shown.facts} of step {shown.step:,}")
