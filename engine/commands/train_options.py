"""The options of `run-train`, which are the settings of a training and how the command goes about it."""

from collections.abc import Callable
from typing import Any, get_args

import click

from engine.commands.option_sources import OptionalNumber
from engine.config import (
    SYNTHETIC_CLASSES,
    SYNTHETIC_IMAGE_SIZE,
    OptimizerName,
    PrecisionName,
    ScheduleName,
    TrainConfig,
)
from engine.images.settings import CropName, PaddingName
from engine.recipes import load_recipe, recipe_names

_OF_THE_DATA = "the data's, {} of --synthetic"
_DEFAULTS = TrainConfig()
_OPTIONAL_INT, _OPTIONAL_FLOAT = OptionalNumber(click.INT), OptionalNumber(click.FLOAT)

GROUPS = {
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
EPILOG = """
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


_OPTIONS = (
    click.option(
        "--recipe", metavar="NAME|FILE", show_default="none", help=f"A known way to train: {', '.join(recipe_names())}."
    ),
    click.option(
        "--list-recipes",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_list_recipes,
        help="Show the recipes and what to expect of them, and exit.",
    ),
    click.option("--steps", type=int, default=_DEFAULTS.steps, metavar="N", help="Updates to make."),
    click.option(
        "--epochs",
        type=_OPTIONAL_FLOAT,
        metavar="E",
        show_default="counted in steps",
        help="Passes over the training split, in place of --steps.",
    ),
    click.option("--batch", type=int, default=_DEFAULTS.batch, metavar="IMAGES", help="Images a step."),
    click.option(
        "--data",
        metavar="DIR|URL",
        help="Packed data set.",
        show_default="$FEEDLOOP_DATA, else data/shards, else the demo set",
    ),
    click.option("--split", default=_DEFAULTS.split, metavar="NAME", help="Split to train on."),
    click.option(
        "--eval-split",
        metavar="NAME|off",
        show_default="val, else test, where the data has one",
        help="Split to evaluate on.",
    ),
    click.option(
        "--eval-every",
        "eval_every_steps",
        type=int,
        default=_DEFAULTS.eval_every_steps,
        metavar="STEPS",
        help="Steps between evaluations; 0 is one at the end.",
    ),
    click.option("--eval-mirror/--no-eval-mirror", default=_DEFAULTS.eval_mirror, help="Evaluate mirror images too."),
    click.option(
        "--stop-at-top1", type=_OPTIONAL_FLOAT, metavar="0…1", show_default="never", help="End once one is reached."
    ),
    click.option(
        "--synthetic/--no-synthetic",
        default=_DEFAULTS.synthetic,
        help="Random batches drawn on the host; needs no data set.",
    ),
    click.option(
        "--model",
        default=_DEFAULTS.model,
        metavar="NAME",
        help="resnet18, 34, 50, 101, 152 or resnet50-xlajl; resnet8, 14, 20, 32, 44, 56, 110, "
        "convnet8 or convnet8-wide for small images; auto is resnet50 from 128 px, resnet8 below.",
    ),
    click.option(
        "--num-classes",
        type=_OPTIONAL_INT,
        metavar="K",
        show_default=_OF_THE_DATA.format(SYNTHETIC_CLASSES),
        help="Outputs of the model.",
    ),
    click.option(
        "--image-size",
        type=_OPTIONAL_INT,
        metavar="PX",
        show_default=_OF_THE_DATA.format(SYNTHETIC_IMAGE_SIZE),
        help="What the network sees; at most the data's.",
    ),
    click.option(
        "--precision",
        type=click.Choice(get_args(PrecisionName)),
        default=_DEFAULTS.precision,
        help="Of activations and products; weights and loss stay float32.",
    ),
    click.option("--init-from", metavar="FILE", show_default="drawn", help="Weights to start from (safetensors)."),
    click.option(
        "--learning-rate",
        "--lr",
        "learning_rate",
        type=_OPTIONAL_FLOAT,
        metavar="RATE",
        show_default="0.1 · images an update / 256",
        help="At the schedule's peak; the default is one for sgd, adamw and lamb want less.",
    ),
    click.option(
        "--optimizer",
        type=click.Choice(get_args(OptimizerName)),
        default=_DEFAULTS.optimizer,
        help="What makes the updates.",
    ),
    click.option(
        "--schedule",
        type=click.Choice(get_args(ScheduleName)),
        default=_DEFAULTS.schedule,
        help="Of the learning rate; step divides it by ten after 1/3, 2/3 and 8/9 of the steps.",
    ),
    click.option(
        "--warmup-steps",
        type=int,
        default=_DEFAULTS.warmup_steps,
        metavar="STEPS",
        help="Linear rise before the schedule.",
    ),
    click.option(
        "--warmup-epochs",
        type=_OPTIONAL_FLOAT,
        metavar="E",
        show_default="counted in steps",
        help="The same in passes over the training split.",
    ),
    click.option(
        "--cycle-momentum/--no-cycle-momentum",
        default=_DEFAULTS.cycle_momentum,
        help="Momentum 0.95 to 0.85 and back against the one-cycle rate.",
    ),
    click.option(
        "--momentum", type=float, default=_DEFAULTS.momentum, metavar="0…1", help="The first beta of adamw and lamb."
    ),
    click.option("--beta2", type=float, default=_DEFAULTS.beta2, metavar="0…1", help="Of adamw and lamb."),
    click.option("--weight-decay", type=float, default=_DEFAULTS.weight_decay, metavar="RATE", help="On kernels."),
    click.option(
        "--decay-all/--no-decay-all", default=_DEFAULTS.decay_all, help="Weight decay on norms and biases too."
    ),
    click.option(
        "--clip-norm", type=_OPTIONAL_FLOAT, metavar="NORM", show_default="none", help="Largest norm of the gradient."
    ),
    click.option(
        "--accumulate-steps", type=int, default=_DEFAULTS.accumulate_steps, metavar="BATCHES", help="Batches an update."
    ),
    click.option(
        "--ema-decay",
        type=_OPTIONAL_FLOAT,
        metavar="0…1",
        show_default="none",
        help="Average the weights; evaluate and keep that.",
    ),
    click.option(
        "--label-smoothing", type=float, default=_DEFAULTS.label_smoothing, metavar="0…1", help="Share for all classes."
    ),
    click.option(
        "--skip-nonfinite",
        type=int,
        default=_DEFAULTS.skip_nonfinite,
        metavar="N",
        help="Updates in a row that may be skipped for a gradient that is not finite; one more ends the run, unless "
        "--no-stop-on-nan.",
    ),
    click.option(
        "--stop-on-nan/--no-stop-on-nan",
        default=_DEFAULTS.stop_on_nan,
        help="End the run after --skip-nonfinite of these, or skip them however many they are.",
    ),
    click.option(
        "--deterministic/--no-deterministic",
        default=_DEFAULTS.deterministic,
        help="On NVIDIA: the same bits again, or whatever is fastest. A CPU knows no difference.",
    ),
    click.option(
        "--crop",
        type=click.Choice(get_args(CropName)),
        default=_DEFAULTS.crop,
        help="centre, random, or resized (random area and aspect).",
    ),
    click.option(
        "--crop-padding", type=int, default=_DEFAULTS.crop_padding, metavar="PX", help="Before a random crop."
    ),
    click.option(
        "--padding-mode",
        type=click.Choice(get_args(PaddingName)),
        default=_DEFAULTS.padding_mode,
        help="Black, or the picture mirrored at its border.",
    ),
    click.option(
        "--crop-area", type=float, default=_DEFAULTS.crop_area, metavar="0…1", help="Least area of a resized crop."
    ),
    click.option("--flip", type=float, default=_DEFAULTS.flip, metavar="0…1", help="Probability of mirroring."),
    click.option("--brightness", type=float, default=_DEFAULTS.brightness, metavar="0…1", help="Largest change."),
    click.option("--contrast", type=float, default=_DEFAULTS.contrast, metavar="0…1", help="Largest change."),
    click.option("--saturation", type=float, default=_DEFAULTS.saturation, metavar="0…1", help="Largest change."),
    click.option(
        "--hue", type=float, default=_DEFAULTS.hue, metavar="0…0.5", help="Largest turn of the colour circle."
    ),
    click.option("--mixup", type=float, default=_DEFAULTS.mixup, metavar="ALPHA", help="Mix neighbours; 0 is off."),
    click.option(
        "--cutmix", type=float, default=_DEFAULTS.cutmix, metavar="ALPHA", help="Cut and paste neighbours; 0 is off."
    ),
    click.option(
        "--erasing", type=float, default=_DEFAULTS.erasing, metavar="0…1", help="Probability of a blank rectangle."
    ),
    click.option(
        "--seed", type=int, default=_DEFAULTS.seed, metavar="N", help="Of initial parameters and image order."
    ),
    click.option(
        "--chunk",
        "chunk_batches",
        type=_OPTIONAL_INT,
        metavar="BATCHES",
        show_default="1; with cuda 10",
        help="Steps between two looks at the host, up to 1024, whose batches cross at once (on NVIDIA: are enqueued): "
        "for steps under a millisecond. Signals and requests wait. Part of the program: a run keeps it.",
    ),
    click.option(
        "--prefetch",
        type=_OPTIONAL_INT,
        metavar="BATCHES",
        show_default="4, two chunks, or a megabyte of small ones",
        help="Batches read ahead.",
    ),
    click.option(
        "--reader-threads", type=int, default=_DEFAULTS.reader_threads, metavar="N", help="Threads that read shards."
    ),
    click.option(
        "--infeed-timeout",
        "infeed_timeout_s",
        type=float,
        default=_DEFAULTS.infeed_timeout_s,
        metavar="SECONDS",
        help="Longest wait for a batch before the run ends.",
    ),
    click.option(
        "--transport",
        type=click.Choice(["auto", "inplace", "cuda", "callback"]),
        default=_DEFAULTS.transport,
        help="How batches cross to the device: auto is inplace on a CPU, cuda on NVIDIA, else callback, the slowest.",
    ),
    click.option(
        "--run-dir", metavar="DIR", show_default="runs/<date>-<time>", help="Where config, losses and weights go."
    ),
    click.option("--resume", is_flag=True, help="Continue the run in --run-dir from its newest snapshot, bit for bit."),
    click.option(
        "--snapshot-every",
        "snapshot_every_steps",
        type=int,
        default=_DEFAULTS.snapshot_every_steps,
        metavar="STEPS",
        help="Steps between snapshots; 0 is one at the end.",
    ),
    click.option(
        "--keep", "keep_snapshots", type=int, default=_DEFAULTS.keep_snapshots, metavar="N", help="Snapshots; 0 is all."
    ),
    click.option("--overwrite", is_flag=True, help="Replace an earlier run in --run-dir."),
    click.option(
        "--compilation-cache",
        metavar="DIR|off",
        show_default="the user's cache folder",
        help="Where compiled programs are kept.",
    ),
    click.option("--dump-hlo", metavar="DIR", help="Write the program's StableHLO and optimised HLO."),
    click.option("--dry-run", is_flag=True, help="Resolve and compile, print memory and FLOPs, run nothing."),
    click.option("--traceback", is_flag=True, help="Show a failure's whole traceback."),
)


def train_options[F: Callable[..., Any]](function: F) -> F:
    """Gives a command the options, in their order."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
