"""The options of `run-train`: one for each setting of a run, and some others."""

from collections.abc import Callable, Iterable
from typing import Any

import click

from loopfeed.engine.commands.look_options import LOOK_OPTIONS
from loopfeed.engine.commands.look_options import OPTIONS as OPTIONS_TO_LOOK
from loopfeed.engine.commands.plan_options import OPTIONS, PLAN_OPTIONS
from loopfeed.engine.commands.setting_options import Decorator, setting_option
from loopfeed.engine.commands.user_parts import OWN_GROUP, user_part_options
from loopfeed.engine.config import COMPILATION, DATA, MONITORING, OUTPUT, SETTINGS
from loopfeed.engine.named_parts import OWN_PARTS
from loopfeed.engine.recipes import load_recipe, recipe_names
from loopfeed.preprocess.commands.completion import complete_word
from loopfeed.preprocess.commands.suggesting import LOG_EVERY_ELSEWHERE, NamedElsewhere

_PROCESSES = ("spawn", "coordinator", "num_processes", "process_id", "peer_timeout", "join_timeout", "requeue")
_ONLY_OWN = tuple(name for name in OWN_PARTS if name not in SETTINGS)
COMMAND_OPTIONS = (
    "recipe",
    "list_recipes",
    *_ONLY_OWN,
    *_PROCESSES,
    *PLAN_OPTIONS,
    *LOOK_OPTIONS,
    "log_every",
    "quiet",
    "traceback",
    "list_models",
)
"""The parameter names of the options that are not settings."""

# Click keeps the line breaks of a paragraph that begins with a backspace.
EPILOG = """
--model, --loss, --optimizer, --schedule, --augment, --batches, --metrics and --evaluation take package.module:function,
the name of your own part or of a function without arguments that returns it. The module is imported, with the working
directory on the path.

Options override the settings of the recipe. For an optional number, the value `default` discards the recipe's value.
A number of steps can be given in epochs: --eval-every 1e, --snapshot-every 0.5e.

The data are what preprocess-imagenet packs from class folders, tables of labels, and containers such as Parquet or
.npz, or loopfeed.pack from Python. For uneven classes see --sampling and --class-weights, for cross-validation --fold,
in the output of --help-all.

\b
Examples:
  run-train --steps 1000 --batch 128
  run-train --data data/shards --model resnet50 --steps 450000 --batch 256
  run-train --recipe imagenet-90 --data data/shards --batch 1024
  run-train --synthetic --model resnet18 --image-size 64 --steps 100
"""

FIRST_OPTIONS = (
    *(
        "recipe",
        "data",
        "run_dir",
        "resume",
        "overwrite",
        "steps",
        "epochs",
        "batch",
        "model",
        "init_from",
        "precision",
    ),
    *("optimizer", "learning_rate", "schedule", "weight_decay", "flip", "crop", "eval_every_steps"),
    *("snapshot_every_steps", "devices", "quiet", "profile", "dry_run", "list_recipes", "list_models"),
)
"""The parameters whose options `run-train --help` shows; `--help-all` shows all."""


def option_groups() -> dict[str, tuple[str, ...]]:
    """Return the headings of `--help`, in order, each with the parameter names of its options."""
    groups: dict[str, list[str]] = {"Recipes": ["recipe", "list_recipes"], DATA: []}
    for setting in filter(lambda each: each.options, SETTINGS.values()):
        groups.setdefault(setting.group, []).append(setting.name)
    groups[SETTINGS["model"].group].append("list_models")
    groups[OWN_GROUP] = list(_ONLY_OWN)
    groups["Several processes"] = list(_PROCESSES)
    groups[OUTPUT] += ["log_every", "quiet", "traceback"]
    groups[COMPILATION] += PLAN_OPTIONS
    groups[MONITORING] += LOOK_OPTIONS
    return {title: tuple(names) for title, names in groups.items()}


def _list_recipes(context: click.Context, _parameter: click.Parameter, is_wanted: bool) -> None:
    """Print the recipes and exit if the option is given."""
    if not is_wanted or context.resilient_parsing:
        return
    for name in recipe_names():
        recipe = load_recipe(name)
        click.echo(f"{name}: {recipe.summary}\n    expected: {recipe.expected}")
    context.exit()


def _list_models(context: click.Context, _parameter: click.Parameter, is_wanted: bool) -> None:
    """Print the models of the registry and exit if the option is given."""
    if not is_wanted or context.resilient_parsing:
        return
    from loopfeed.models.registry import summarise_models

    for each in summarise_models():
        click.echo(
            f"{each.name:<15} {each.num_params:>11,} parameters  {each.num_products / 1e6:>9,.1f} million "
            f"multiply-accumulates at {each.image_size} px, {each.num_classes:,} classes"
        )
    context.exit()


_RECIPE = click.option(
    "--recipe",
    metavar="NAME|FILE",
    show_default="none",
    shell_complete=complete_word(recipe_names, or_file=True),
    help=f"Recipe to start from: {', '.join(recipe_names())}; your own TOML file; or the config.json of a run.",
)
_OF_THE_COMMAND = (
    click.option(
        "--log-every",
        cls=NamedElsewhere,
        also_called=LOG_EVERY_ELSEWHERE,
        type=click.IntRange(min=1),
        metavar="STEPS",
        show_default="a progress line on a terminal, else a line every 5 seconds",
        help="Print a line every STEPS steps, and for the first and the last.",
    ),
    click.option("--quiet", "-q", is_flag=True, help="Print nothing but warnings, errors and how the run ended."),
    click.option(
        "--list-recipes",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_list_recipes,
        help="List the recipes with their expected accuracy, and exit.",
    ),
    click.option(
        "--list-models",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_list_models,
        help="List the models with their parameters, multiply-accumulates and usual image size, and exit.",
    ),
    click.option(
        "--spawn",
        type=click.IntRange(min=2),
        metavar="N",
        show_default="one process",
        help="Train in N processes on this machine, and end all of them if one dies.",
    ),
    click.option(
        "--coordinator",
        metavar="HOST:PORT|auto",
        show_default="one process",
        help="Join other processes: the address of the first one; auto, as Slurm, Open MPI or Kubernetes describe it.",
    ),
    click.option(
        "--num-processes", type=click.IntRange(min=1), metavar="N", help="Number of processes, with a HOST:PORT."
    ),
    click.option(
        "--process-id", type=click.IntRange(min=0), metavar="I", help="Number of this process, with a HOST:PORT."
    ),
    click.option(
        "--peer-timeout",
        type=click.FloatRange(min=5, max=86_400),
        default=60.0,
        metavar="SECONDS",
        help="End the run if another process does not answer for so long.",
    ),
    click.option(
        "--join-timeout",
        type=click.FloatRange(min=1, max=86_400),
        default=120.0,
        metavar="SECONDS",
        help="Wait so long for the other processes at the start.",
    ),
    click.option(
        "--requeue",
        is_flag=True,
        help="Under Slurm: continue the run in --run-dir, if there is one; if the time limit or a preemption stops it, "
        "put the job back into the queue.",
    ),
    *OPTIONS,
    *OPTIONS_TO_LOOK,
)


def train_options[F: Callable[..., Any]](function: F) -> F:
    """Decorate a command with all options of `run-train`."""
    for option in _OF_THE_COMMAND:
        function = option(function)
    describing_options(SETTINGS)(function)
    return function


def describing_options(names: Iterable[str]) -> Decorator:
    """Return a decorator that adds the options that describe a run: these settings, the recipe, and own parts."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            if SETTINGS[name].options:
                function = setting_option(name)(function)
        function = _RECIPE(function)
        return user_part_options(_ONLY_OWN)(function)

    return decorate
