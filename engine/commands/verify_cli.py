"""The `verify-run` command, which replays part of a run and checks that the results are identical to the last bit.

jax and numpy are imported where they are first needed, so that `--help` answers at once.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import click

from loopfeed.engine.commands.command_end import DONE, FAILED, STOPPED, ending, say_on_terminal, say_to_stderr
from loopfeed.engine.commands.setting_options import overriding_option
from loopfeed.engine.commands.user_parts import OWN_GROUP, load_user_parts, take_part_names, user_part_options
from loopfeed.engine.named_parts import OWN_PARTS
from loopfeed.preprocess.commands.completion import complete_folder
from loopfeed.preprocess.commands.grouped_help import GroupedCommand
from loopfeed.preprocess.commands.guarded_output import terminal_of
from loopfeed.preprocess.commands.storage import storage_option
from loopfeed.preprocess.printable import printable_line
from loopfeed.preprocess.storage_options import parse_pairs

if TYPE_CHECKING:
    from loopfeed.engine.stream.sinks import Sink

_GROUPS = {
    "Stretch": ("from_step", "to_step"),
    "Data": ("data", "sampling", "class_weights"),
    OWN_GROUP: tuple(OWN_PARTS),
    "Stored run": ("storage_option",),
    "Output": ("traceback",),
}
# Click keeps the line breaks of a paragraph that begins with a backspace.
_EPILOG = """\b
Examples:
  verify-run runs/first
  verify-run runs/first --from 0 --to 100
  verify-run runs/first --from 400 --data /mnt/imagenet
"""


@click.command(cls=GroupedCommand, option_groups=_GROUPS, epilog=_EPILOG)
@click.argument("run", shell_complete=complete_folder)
@click.option(
    "--from",
    "from_step",
    type=click.IntRange(min=0),
    metavar="STEP",
    show_default="the oldest snapshot, else 0",
    help="Start from the snapshot of this step; 0 is the initial state, before the first step.",
)
@click.option(
    "--to",
    "to_step",
    type=click.IntRange(min=1),
    metavar="STEP",
    show_default="the last recorded step",
    help="Last step to replay; its snapshot, if any, is compared too.",
)
@overriding_option(
    "data", default_text="as in the run", help_text="Current location of the packed data set (a folder or a URL)."
)
@overriding_option(
    "sampling", unit="FILE", default_text="as in the run", help_text="Current location of the run's table of weights."
)
@overriding_option(
    "class_weights",
    unit="FILE",
    default_text="as in the run",
    help_text="Current location of the run's table of class weights.",
)
@user_part_options(OWN_PARTS)
@storage_option
def main(
    run: str,
    from_step: int | None,
    to_step: int | None,
    data: str | None,
    sampling: str | None,
    class_weights: str | None,
    storage_option: tuple[str, ...],
    traceback: bool,
    **own: str | None,
) -> None:
    """Replay part of the run in folder RUN, and compare the result bit by bit with the run's record.

    Compares every loss, learning rate and evaluation, and the arrays of the last step's snapshot. RUN is only
    read, can still be training, and may be the URL of a run in an object store. The verdict goes to stdout, all other
    messages go to stderr.

    Exit codes: 0 the same bits, 1 they differ or the replay failed, 2 wrong usage or data, 130 stopped by SIGINT,
    SIGTERM or SIGHUP.
    """
    with ending("verify-run", "stopped; nothing was written", traceback=traceback) as end:
        from loopfeed.engine.replay.replay import replay_parts

        display, say = _progress()
        parts = load_user_parts(take_part_names(own, {}))
        places = {"data": data, "sampling": sampling, "class_weights": class_weights}
        report = replay_parts(run, (from_step, to_step), parts, say, display, places, parse_pairs(storage_option))
        click.echo("\n".join(map(printable_line, str(report).splitlines())))
        end.code = FAILED if not report.is_same else DONE if report.stopped_by is None else STOPPED


def _progress() -> "tuple[Callable[[int, int], Sink] | None, Callable[[str], None]]":
    """Return two functions: one to create a progress line (None if stderr is not a terminal) and one to print text."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None, say_to_stderr
    from rich.console import Console

    from loopfeed.engine.commands.terminal import ProgressSink

    # One console for both, so that messages are printed above the progress line.
    console = Console(file=terminal_of(sys.stderr))

    def display(steps: int, batch: int) -> "Sink":
        return ProgressSink(console, steps=steps, image_at=lambda step: step * batch)

    return display, partial(say_on_terminal, console)
