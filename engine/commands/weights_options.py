"""The options that describe a weights file, shared by the commands that read one."""

import click

from models.names import MODEL_NAMES
from preprocess.commands.completion import complete_word

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
