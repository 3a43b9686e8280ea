"""The `report-run` command, which writes an HTML page about one or several runs.

jax and numpy are imported where they are first needed, so that `--help` answers at once.
"""

from typing import Any

import click

from loopfeed.engine.commands.command_end import ending, say_to_stderr
from loopfeed.engine.commands.setting_options import overriding_option
from loopfeed.engine.commands.user_parts import OWN_GROUP, load_user_parts, take_part_names, user_part_options
from loopfeed.preprocess.commands.completion import complete_file, complete_folder
from loopfeed.preprocess.commands.grouped_help import GroupedCommand
from loopfeed.preprocess.commands.guarded_output import show_only_on_stdout
from loopfeed.preprocess.commands.storage import storage_option
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.storage_options import parse_pairs

_GROUPS = {
    "Evaluation": ("evaluate", "data", "eval_split"),
    OWN_GROUP: ("model", "loss", "metrics"),
    "Stored runs": ("storage_option",),
    "Output": ("out", "overwrite", "traceback"),
}
_EPILOG = """\b
Examples:
  report-run runs/photos
  report-run runs/photos runs/photos-larger --out comparison.html
  report-run runs/photos --no-evaluate
  report-run runs/mine --model mine.model:build
"""


@click.command(cls=GroupedCommand, option_groups=_GROUPS, epilog=_EPILOG)
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN…]", shell_complete=complete_folder)
@click.option(
    "--evaluate/--no-evaluate",
    default=True,
    help="Evaluate the weights, for the confusion matrix, the accuracy of each class, and mistakes.",
)
@overriding_option(
    "data", default_text="as in each run", help_text="Current location of the packed data set (a folder or a URL)."
)
@overriding_option(
    "eval_split",
    "--split",
    default_text="as in each run, else val, else test",
    help_text="Split to evaluate.",
    unit="NAME",
)
@user_part_options(_GROUPS[OWN_GROUP])
@storage_option
@click.option(
    "--out",
    metavar="FILE",
    default="report.html",
    shell_complete=complete_file,
    help="The file to write.",
)
@click.option("--overwrite", is_flag=True, help="Replace the file.")
def main(
    *,
    runs: tuple[str, ...],
    evaluate: bool,
    data: str | None,
    eval_split: str | None,
    storage_option: tuple[str, ...],
    out: str,
    overwrite: bool,
    traceback: bool,
    **own: Any,
) -> None:
    """Write a self-contained HTML page about the runs in the folders RUN, side by side if there are several.

    RUN is only read, may still be training, and may be the URL of a run in an object store. What a run lacks is left
    out, with the reason. The page loads nothing from a network, so it can be sent as it is. Its name goes to stdout,
    all other messages go to stderr.

    Exit codes: 0 done, 1 failed, 2 wrong usage or no run folder, 130 stopped by SIGINT, SIGTERM or SIGHUP.
    """
    with ending("report-run", "stopped; nothing was written", traceback=traceback):
        from loopfeed.engine.report_page.report import report_run

        parts = load_user_parts(take_part_names(own, {}))
        path = report_run(
            runs,
            out,
            evaluate=evaluate,
            data=data,
            split=eval_split,
            model=parts.model,
            loss=parts.loss,
            metrics=parts.metrics,
            overwrite=overwrite,
            notify=say_to_stderr,
            storage_options=parse_pairs(storage_option),
        )
        show_only_on_stdout()
        click.echo(f"{printable(path)} ({path.stat().st_size / 1e6:.2f} MB)")
