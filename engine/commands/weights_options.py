"""The options that describe a weights file, shared by the commands that read one."""

from typing import Literal

import click

from loopfeed.models.names import MODEL_NAMES
from loopfeed.preprocess.commands.completion import complete_word


def parse_snapshot(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> int | Literal["best"] | None:
    """Return the snapshot of a run that an option names: its step, or "best" for the one with the best evaluation."""
    if text is None:
        return None
    if text == "best":
        return "best"
    if not (text.isascii() and text.isdigit()):
        raise click.BadParameter(f"must be a step or best, got {text}: give the number of a kept snapshot")
    return int(text)


model_option = click.option(
    "--model",
    metavar="NAME",
    show_default="as recorded in FILE",
    shell_complete=complete_word(lambda: MODEL_NAMES),
    help="Model of the weights in FILE; or the model that RUN was trained with, if it was your own, MODULE:NAME.",
)
mean_option = click.option(
    "--mean",
    type=float,
    nargs=3,
    metavar="R G B",
    show_default="as recorded in FILE, else ImageNet's",
    help="Channel means for normalisation (0 … 1).",
)
std_option = click.option(
    "--std",
    type=float,
    nargs=3,
    metavar="R G B",
    show_default="as recorded in FILE, else ImageNet's",
    help="Channel standard deviations for normalisation (0 … 1).",
)
