"""The `export-model` command, which writes trained weights in a format of other programs.

jax and numpy are imported where they are first needed, so that `--help` answers at once.
"""

from pathlib import Path
from typing import Any, Literal

import click

from loopfeed.engine.commands.command_end import ending, say_to_stderr
from loopfeed.engine.commands.user_parts import load_user_parts, take_part_names
from loopfeed.engine.commands.weights_options import model_option, parse_snapshot
from loopfeed.preprocess.commands.completion import complete_file, complete_word
from loopfeed.preprocess.commands.grouped_help import GroupedCommand
from loopfeed.preprocess.commands.guarded_output import show_only_on_stdout
from loopfeed.preprocess.commands.storage import storage_option
from loopfeed.preprocess.commands.suggesting import SuggestingChoice
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.storage_options import parse_pairs

_FORMATS = ("safetensors", "timm", "stablehlo", "onnx")
_GROUPS = {
    "Output": ("format", "overwrite", "traceback"),
    "Snapshot of a run": ("snapshot", "metric"),
    "Weights": ("model", "image_size"),
    "Stored run": ("storage_option",),
}
_EPILOG = """\b
Examples:
  export-model runs/photos photos.onnx
  export-model runs/photos photos.stablehlo --snapshot best
  export-model runs/photos photos-timm                       # a folder for timm
  export-model runs/photos step-4000.safetensors --snapshot 4000
"""


@click.command(cls=GroupedCommand, option_groups=_GROUPS, epilog=_EPILOG)
@click.argument("run", metavar="RUN|WEIGHTS", shell_complete=complete_file)
@click.argument("out", shell_complete=complete_file)
@click.option(
    "--format",
    type=SuggestingChoice(_FORMATS),
    show_default="by the suffix of OUT; without one, timm",
    help="safetensors: the weights alone; timm: a folder for timm; stablehlo: a program for jax; onnx.",
)
@click.option(
    "--snapshot",
    metavar="STEP|best",
    callback=parse_snapshot,
    show_default="the weights at the end of the run",
    shell_complete=complete_word(lambda: ("best",)),
    help="Step of the snapshot; best is the kept snapshot with the best evaluation.",
)
@click.option(
    "--metric",
    metavar="NAME",
    show_default="--keep-best of the run, else top1, else loss",
    shell_complete=complete_word(lambda: ("top1", "top5", "loss")),
    help="What is best: top1, top5, loss, or a metric of your own as NAME:max or NAME:min.",
)
@model_option
@click.option(
    "--image-size",
    type=click.IntRange(min=1),
    metavar="PIXELS",
    show_default="as recorded in WEIGHTS",
    help="Height and width of the input of weights from a file.",
)
@storage_option
@click.option("--overwrite", is_flag=True, help="Replace OUT.")
def main(
    *,
    run: str,
    out: str,
    format: Any,  # noqa: A002 - click names the argument as the option
    snapshot: int | Literal["best"] | None,
    metric: str | None,
    image_size: int | None,
    storage_option: tuple[str, ...],
    overwrite: bool,
    traceback: bool,
    **options: Any,
) -> None:
    """Write trained weights to OUT, for other programs: as safetensors, a folder of timm, StableHLO or ONNX.

    RUN is a folder, or the URL of a run in an object store; it is only read, and can still be training. WEIGHTS is what
    run-train --init-from takes. The moving average of the weights is written, if the run keeps one.

    StableHLO and ONNX take uint8 RGB images [batch, height, width, 3], already resized and cropped, and return logits
    and probabilities; classes, size and resize rule are in the file.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by SIGINT, SIGTERM or SIGHUP.
    """
    with ending("export-model", "stopped; nothing was written", traceback=traceback):
        from loopfeed.engine.export.export import export_model

        is_run = Path(run).is_dir()
        named = load_user_parts(take_part_names(options, {"model": None})) if is_run else None
        done = export_model(
            run,
            out,
            format=format,
            snapshot=snapshot,
            metric=metric,
            model=options["model"] if named is None else named.model or options["model"],
            image_size=image_size,
            overwrite=overwrite,
            notify=say_to_stderr,
            storage_options=parse_pairs(storage_option),
        )
        show_only_on_stdout()
        after = f" after {quantity(done.step, 'step')}" if done.step else ""
        click.echo(
            f"{printable(done.path)}: {done.format}, the weights{after}, {done.num_bytes / 1e6:,.1f} MB "
            f"(sha256 {done.digest[:12]})"
        )
