"""The command `run-train`: options to settings, the loss stream to the terminal, errors to one line."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from engine.augmentation.settings import CropName, PaddingName
from engine.commands.command_end import describe_error, leave, say_to_stderr
from engine.commands.new_run_dir import run_dir_of
from engine.commands.option_sources import (
    MergedOptions,
    OptionalNumber,
    OptionSource,
    command_line,
    merge_options,
    with_option_names,
)
from engine.commands.run_display import loss_display, show_plan, summarise
from engine.config import (
    SYNTHETIC_CLASSES,
    SYNTHETIC_IMAGE_SIZE,
    OptimizerName,
    PrecisionName,
    ScheduleName,
    TrainConfig,
)
from engine.recipes import LoadedRecipe, load_recipe, recipe_names
from preprocess.grouped_help import GroupedCommand

if TYPE_CHECKING:
    from engine.result import DryRun, TrainResult

_DONE, _FAILED, _WRONG_USAGE, _STOPPED = 0, 1, 2, 130
_RECORDED = "the recorded run"
_OF_THE_DATA = "the data's, {} of --synthetic"
_DEFAULTS = TrainConfig()
_OPTIONAL_INT, _OPTIONAL_FLOAT = OptionalNumber(click.INT), OptionalNumber(click.FLOAT)

_GROUPS = {
    "Recipes": ("recipe", "list_recipes"),
    "Data": ("data", "split", "eval_split", "synthetic", "image_size", "num_classes"),
    "Training": (
        "steps",
        "epochs",
        "batch",
        "eval_every_steps",
        "eval_mirror",
        "stop_at_top1",
        "model",
        "init_from",
        "precision",
        "seed",
        "label_smoothing",
        "ema_decay",
        "skip_nonfinite",
        "stop_on_nan",
        "deterministic",
    ),
    "Optimiser": (
        "optimizer",
        "learning_rate",
        "schedule",
        "warmup_steps",
        "warmup_epochs",
        "cycle_momentum",
        "momentum",
        "beta2",
        "weight_decay",
        "decay_all",
        "clip_norm",
        "accumulate_steps",
    ),
    "Augmentation": (
        "crop",
        "crop_padding",
        "padding_mode",
        "crop_area",
        "flip",
        "brightness",
        "contrast",
        "saturation",
        "hue",
        "mixup",
        "cutmix",
        "erasing",
    ),
    "Infeed": ("chunk_batches", "prefetch", "reader_threads", "infeed_timeout_s", "transport"),
    "Output": ("run_dir", "resume", "snapshot_every_steps", "keep_snapshots", "overwrite", "traceback"),
    "Compilation": ("compilation_cache", "dump_hlo", "dry_run"),
}
# Click keeps the line breaks of a paragraph that begins with a backspace.
_EPILOG = """
An option given here wins over the recipe's; the word `default` in place of an optional number takes the recipe's away.

\b
Examples:
  run-train --steps 1000 --batch 128
  run-train --data data/shards --model resnet50 --steps 450000 --batch 256
  run-train --recipe imagenet-90 --data data/shards --batch 1024
  run-train --synthetic --model resnet18 --image-size 64 --steps 100
"""


def _list_recipes(context: click.Context, _parameter: click.Parameter, is_wanted: bool) -> None:
    """Prints the recipes and ends the command."""
    if not is_wanted:
        return
    for name in recipe_names():
        recipe = load_recipe(name)
        click.echo(f"{name}: {recipe.summary}\n    expected: {recipe.expected}")
    context.exit()


@click.command(
    cls=GroupedCommand,
    option_groups=_GROUPS,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.option(
    "--recipe", metavar="NAME|FILE", show_default="none", help=f"A known way to train: {', '.join(recipe_names())}."
)
@click.option(
    "--list-recipes",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_recipes,
    help="Show the recipes and what to expect of them, and exit.",
)
@click.option("--steps", type=int, default=_DEFAULTS.steps, metavar="N", help="Updates to make.")
@click.option(
    "--epochs",
    type=_OPTIONAL_FLOAT,
    metavar="E",
    show_default="counted in steps",
    help="Passes over the training split, in place of --steps.",
)
@click.option("--batch", type=int, default=_DEFAULTS.batch, metavar="IMAGES", help="Images a step.")
@click.option(
    "--data",
    metavar="DIR|URL",
    help="Packed data set.",
    show_default="$FEEDLOOP_DATA, else data/shards, else the demo set",
)
@click.option("--split", default=_DEFAULTS.split, metavar="NAME", help="Split to train on.")
@click.option(
    "--eval-split",
    metavar="NAME|off",
    show_default="val, else test, where the data has one",
    help="Split to evaluate on.",
)
@click.option(
    "--eval-every",
    "eval_every_steps",
    type=int,
    default=_DEFAULTS.eval_every_steps,
    metavar="STEPS",
    help="Steps between evaluations; 0 is one at the end.",
)
@click.option("--eval-mirror/--no-eval-mirror", default=_DEFAULTS.eval_mirror, help="Evaluate mirror images too.")
@click.option(
    "--stop-at-top1", type=_OPTIONAL_FLOAT, metavar="0…1", show_default="never", help="End once one is reached."
)
@click.option(
    "--synthetic/--no-synthetic",
    default=_DEFAULTS.synthetic,
    help="Random batches drawn on the host; needs no data set.",
)
@click.option(
    "--model",
    default=_DEFAULTS.model,
    metavar="NAME",
    help="resnet18, 34, 50, 101, 152 or resnet50-xlajl; resnet8, 14, 20, 32, 44, 56, 110, "
    "convnet8 or convnet8-wide for small images; auto is resnet50 from 128 px, resnet8 below.",
)
@click.option(
    "--num-classes",
    type=_OPTIONAL_INT,
    metavar="K",
    show_default=_OF_THE_DATA.format(SYNTHETIC_CLASSES),
    help="Outputs of the model.",
)
@click.option(
    "--image-size",
    type=_OPTIONAL_INT,
    metavar="PX",
    show_default=_OF_THE_DATA.format(SYNTHETIC_IMAGE_SIZE),
    help="What the network sees; at most the data's.",
)
@click.option(
    "--precision",
    type=click.Choice(get_args(PrecisionName)),
    default=_DEFAULTS.precision,
    help="Of activations and products; weights and loss stay float32.",
)
@click.option("--init-from", metavar="FILE", show_default="drawn", help="Weights to start from (safetensors).")
@click.option(
    "--learning-rate",
    "--lr",
    "learning_rate",
    type=_OPTIONAL_FLOAT,
    metavar="RATE",
    show_default="0.1 · images an update / 256",
    help="At the schedule's peak.",
)
@click.option(
    "--optimizer",
    type=click.Choice(get_args(OptimizerName)),
    default=_DEFAULTS.optimizer,
    help="What makes the updates.",
)
@click.option(
    "--schedule",
    type=click.Choice(get_args(ScheduleName)),
    default=_DEFAULTS.schedule,
    help="Of the learning rate; step divides it by ten after 1/3, 2/3 and 8/9 of the steps.",
)
@click.option(
    "--warmup-steps", type=int, default=_DEFAULTS.warmup_steps, metavar="STEPS", help="Linear rise before the schedule."
)
@click.option(
    "--warmup-epochs",
    type=_OPTIONAL_FLOAT,
    metavar="E",
    show_default="counted in steps",
    help="The same in passes over the training split.",
)
@click.option(
    "--cycle-momentum/--no-cycle-momentum",
    default=_DEFAULTS.cycle_momentum,
    help="Momentum 0.95 to 0.85 and back against the one-cycle rate.",
)
@click.option(
    "--momentum", type=float, default=_DEFAULTS.momentum, metavar="0…1", help="The first beta of adamw and lamb."
)
@click.option("--beta2", type=float, default=_DEFAULTS.beta2, metavar="0…1", help="Of adamw and lamb.")
@click.option("--weight-decay", type=float, default=_DEFAULTS.weight_decay, metavar="RATE", help="On kernels.")
@click.option("--decay-all/--no-decay-all", default=_DEFAULTS.decay_all, help="Weight decay on norms and biases too.")
@click.option(
    "--clip-norm", type=_OPTIONAL_FLOAT, metavar="NORM", show_default="none", help="Largest norm of the gradient."
)
@click.option(
    "--accumulate-steps", type=int, default=_DEFAULTS.accumulate_steps, metavar="BATCHES", help="Batches an update."
)
@click.option(
    "--ema-decay",
    type=_OPTIONAL_FLOAT,
    metavar="0…1",
    show_default="none",
    help="Average the weights; evaluate and keep that.",
)
@click.option(
    "--label-smoothing", type=float, default=_DEFAULTS.label_smoothing, metavar="0…1", help="Share for all classes."
)
@click.option(
    "--skip-nonfinite",
    type=int,
    default=_DEFAULTS.skip_nonfinite,
    metavar="N",
    help="Updates in a row that may be skipped for a gradient that is not finite; one more ends the run.",
)
@click.option(
    "--stop-on-nan/--no-stop-on-nan",
    default=_DEFAULTS.stop_on_nan,
    help="End the run there, or skip such updates however many there are.",
)
@click.option(
    "--deterministic/--no-deterministic",
    default=_DEFAULTS.deterministic,
    help="On NVIDIA: the same bits again, or whatever is fastest. A CPU knows no difference.",
)
@click.option(
    "--crop",
    type=click.Choice(get_args(CropName)),
    default=_DEFAULTS.crop,
    help="centre, random, or resized (random area and aspect).",
)
@click.option("--crop-padding", type=int, default=_DEFAULTS.crop_padding, metavar="PX", help="Before a random crop.")
@click.option(
    "--padding-mode",
    type=click.Choice(get_args(PaddingName)),
    default=_DEFAULTS.padding_mode,
    help="Black, or the picture mirrored at its border.",
)
@click.option(
    "--crop-area", type=float, default=_DEFAULTS.crop_area, metavar="0…1", help="Least area of a resized crop."
)
@click.option("--flip", type=float, default=_DEFAULTS.flip, metavar="0…1", help="Probability of mirroring.")
@click.option("--brightness", type=float, default=_DEFAULTS.brightness, metavar="0…1", help="Largest change.")
@click.option("--contrast", type=float, default=_DEFAULTS.contrast, metavar="0…1", help="Largest change.")
@click.option("--saturation", type=float, default=_DEFAULTS.saturation, metavar="0…1", help="Largest change.")
@click.option("--hue", type=float, default=_DEFAULTS.hue, metavar="0…0.5", help="Largest turn of the colour circle.")
@click.option("--mixup", type=float, default=_DEFAULTS.mixup, metavar="ALPHA", help="Mix neighbours; 0 is off.")
@click.option(
    "--cutmix", type=float, default=_DEFAULTS.cutmix, metavar="ALPHA", help="Cut and paste neighbours; 0 is off."
)
@click.option(
    "--erasing", type=float, default=_DEFAULTS.erasing, metavar="0…1", help="Probability of a blank rectangle."
)
@click.option("--seed", type=int, default=_DEFAULTS.seed, metavar="N", help="Of initial parameters and image order.")
@click.option(
    "--chunk",
    "chunk_batches",
    type=_OPTIONAL_INT,
    metavar="BATCHES",
    show_default="1; with cuda 10",
    help="Steps between two looks at the host, up to 1024, whose batches cross at once (on NVIDIA: are enqueued): for "
    "steps under a millisecond. Signals and requests wait. Part of the program: a run keeps it.",
)
@click.option(
    "--prefetch",
    type=_OPTIONAL_INT,
    metavar="BATCHES",
    show_default="4, two chunks, or a megabyte of small ones",
    help="Batches read ahead.",
)
@click.option(
    "--reader-threads", type=int, default=_DEFAULTS.reader_threads, metavar="N", help="Threads that read shards."
)
@click.option(
    "--infeed-timeout",
    "infeed_timeout_s",
    type=float,
    default=_DEFAULTS.infeed_timeout_s,
    metavar="SECONDS",
    help="Longest wait for a batch before the run ends.",
)
@click.option(
    "--transport",
    type=click.Choice(["auto", "inplace", "cuda", "callback"]),
    default=_DEFAULTS.transport,
    help="How batches cross to the device: auto is inplace on a CPU, cuda on NVIDIA, else callback, the slowest.",
)
@click.option(
    "--run-dir", metavar="DIR", show_default="runs/<date>-<time>", help="Where config, losses and weights go."
)
@click.option("--resume", is_flag=True, help="Continue the run in --run-dir from its newest snapshot, bit for bit.")
@click.option(
    "--snapshot-every",
    "snapshot_every_steps",
    type=int,
    default=_DEFAULTS.snapshot_every_steps,
    metavar="STEPS",
    help="Steps between snapshots; 0 is one at the end.",
)
@click.option(
    "--keep", "keep_snapshots", type=int, default=_DEFAULTS.keep_snapshots, metavar="N", help="Snapshots; 0 is all."
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier run in --run-dir.")
@click.option(
    "--compilation-cache",
    metavar="DIR|off",
    show_default="the user's cache folder",
    help="Where compiled programs are kept.",
)
@click.option("--dump-hlo", metavar="DIR", help="Write the program's StableHLO and optimised HLO.")
@click.option("--dry-run", is_flag=True, help="Resolve and compile, print memory and FLOPs, run nothing.")
@click.option("--traceback", is_flag=True, help="Show a failure's whole traceback.")
@click.version_option(package_name="feedloop")
@click.pass_context
def main(context: click.Context, /, *, recipe: str | None, dry_run: bool, traceback: bool, **_options: Any) -> None:
    """Train an image classifier in one compiled program.

    Batches stream in and losses stream out while a single while-loop trains on the device. Exit codes: 0 done, 1 the
    run failed, 2 wrong usage or data, 130 stopped by SIGINT, SIGTERM or control-run with a last snapshot.
    """
    is_saved = True
    try:
        merged = _merge(context, None if recipe is None else load_recipe(recipe))
        config = TrainConfig(**merged.settings)
        if dry_run:
            show_plan(_plan(config))
            code = _DONE
        else:
            result = _train(config, merged.origins)
            code, is_saved = _DONE if result.is_complete else _STOPPED, result.snapshot_step == result.steps_done
    except KeyboardInterrupt:
        say_to_stderr("run-train: stopped at once; no weights were written")
        code = _STOPPED
    except Exception as error:
        if traceback:
            raise
        say_to_stderr(f"run-train: {with_option_names(describe_error(error), main)}")
        code = _WRONG_USAGE if isinstance(error, ValueError) else _FAILED
    # A disk that did not take the last snapshot may hold its thread for ever.
    leave(code, at_once=not is_saved)


def _merge(context: click.Context, recipe: LoadedRecipe | None) -> MergedOptions:
    """Puts the command line above the recipe, or the record of the run that is resumed, and says what comes of it."""
    if context.params["resume"]:
        return _resumed_options(context, recipe)
    if recipe is None:
        return merge_options(command_line(context))
    merged = merge_options(OptionSource(f"recipe {recipe.name}", recipe.settings), command_line(context))
    changed = ", ".join(merged.overrides)
    click.echo(
        f"recipe {recipe.name}: {recipe.expected}" + (f"; the command line overrides {changed}" if changed else "")
    )
    return merged


def _resumed_options(context: click.Context, recipe: LoadedRecipe | None) -> MergedOptions:
    """Puts the command line above the settings that the run was begun with."""
    from engine.records.recorded_run import read_recorded

    run_dir = context.params["run_dir"]
    if run_dir is None:
        raise ValueError("--resume continues a run, and none is named: give its --run-dir")
    if context.params["overwrite"]:
        raise ValueError("--resume continues a run and --overwrite replaces it, got both: give one of the two")
    recorded = read_recorded(Path(run_dir))
    if recipe is not None and f"recipe {recipe.name}" not in recorded.origins.values():
        raise ValueError(
            f"a resumed run keeps its recipe, and {run_dir} has none called {recipe.name}: leave --recipe out"
        )
    merged = merge_options(OptionSource(_RECORDED, recorded.config.to_json()), command_line(context))
    origins = {
        name: recorded.origins.get(name, origin) if origin == _RECORDED else origin
        for name, origin in merged.origins.items()
    }
    return replace(merged, origins=origins)


def _plan(config: TrainConfig) -> "DryRun":
    from engine.epochs import settle_epochs
    from engine.run import plan_run

    return plan_run(settle_epochs(config, notify=click.echo), notify=click.echo)


def _train(config: TrainConfig, origins: dict[str, str]) -> "TrainResult":
    from engine.epochs import settle_epochs
    from engine.run import train

    config = settle_epochs(config, notify=click.echo)
    sink, notify = loss_display(config)
    with run_dir_of(config.run_dir) as run_dir:
        result = train(replace(config, run_dir=run_dir), sinks=[sink], notify=notify, origins=origins)
    summarise(result)
    return result
