"""The `export-weights` command, which writes the weights of a snapshot to a safetensors file.

jax and numpy are imported where they are first needed, so that `--help` answers at once.
"""

from typing import Literal

import click

from loopfeed.engine.commands.command_end import ending, say_to_stderr
from loopfeed.engine.commands.weights_options import parse_snapshot
from loopfeed.preprocess.commands.completion import complete_file, complete_folder, complete_word
from loopfeed.preprocess.commands.grouped_help import GroupedCommand
from loopfeed.preprocess.commands.guarded_output import show_only_on_stdout
from loopfeed.preprocess.commands.storage import storage_option
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.storage_options import parse_pairs

_GROUPS = {
    "Snapshot": ("snapshot", "metric"),
    "Stored run": ("storage_option",),
    "Output": ("overwrite", "traceback"),
}
_EPILOG = """\b
Examples:
  export-weights runs/photos --snapshot 4000 step-4000.safetensors
  export-weights runs/photos --snapshot best best.safetensors
  export-weights runs/photos --snapshot best --metric loss best.safetensors
"""


@click.command(cls=GroupedCommand, option_groups=_GROUPS, epilog=_EPILOG)
@click.argument("run", shell_complete=complete_folder)
@click.argument("out", shell_complete=complete_file)
@click.option(
    "--snapshot",
    required=True,
    metavar="STEP|best",
    callback=parse_snapshot,
    shell_complete=complete_word(lambda: ("best",)),
    help="Step of the snapshot; best is the kept snapshot with the best evaluation.",
)
@click.option(
    "--metric",
    metavar="NAME",
    show_default="--keep-best of the run, else top1",
    shell_complete=complete_word(lambda: ("top1", "top5", "loss")),
    help="What is best: top1, top5, loss, or a metric of your own as NAME:max or NAME:min.",
)
@storage_option
@click.option("--overwrite", is_flag=True, help="Replace the file OUT.")
def main(
    run: str,
    out: str,
    snapshot: int | Literal["best"],
    metric: str | None,
    storage_option: tuple[str, ...],
    overwrite: bool,
    traceback: bool,
) -> None:
    """Write the weights in a snapshot of the run in folder RUN to the safetensors file OUT.

    The file is like the model.safetensors that a run writes at its end: the moving average of the weights, if the run
    keeps one, with the same metadata. RUN is only read, can still be training, and may be the URL of a run in an object
    store.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by SIGINT, SIGTERM or SIGHUP.
    """
    with ending("export-weights", "stopped; nothing was written", traceback=traceback):
        from loopfeed.engine.evaluation.export import export_weights

        if metric is not None and snapshot != "best":
            raise ValueError(
                f"--metric can be given only with --snapshot best, got --snapshot {snapshot}: leave it out"
            )
        done = export_weights(
            run,
            out,
            snapshot=snapshot,
            metric=metric,
            overwrite=overwrite,
            notify=say_to_stderr,
            storage_options=parse_pairs(storage_option),
        )
        show_only_on_stdout()
        click.echo(f"{printable(done.path)}: the weights after {done.step:,} steps (sha256 {done.digest[:12]})")
