"""The options of `run-train` that describe a plan, and how they are checked."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from loopfeed.engine.config import TrainConfig, parse_devices
from loopfeed.engine.settings import SettingError
from loopfeed.engine.sizing.cards import CARDS
from loopfeed.preprocess.commands.suggesting import SuggestingChoice

if TYPE_CHECKING:
    from loopfeed.engine.parts import UserParts
    from loopfeed.engine.sizing.planning import Target

PLAN_OPTIONS = ("dry_run", "target", "devices_per_host", "rate")
"""The parameter names of these options."""
_DEVICES_PER_HOST = 8

OPTIONS = (
    click.option(
        "--dry-run",
        is_flag=True,
        help="Compile the program and print a plan of the run (memory, data, time, disk), but do not train.",
    ),
    click.option(
        "--target",
        type=SuggestingChoice(tuple(CARDS)),
        metavar="GPU",
        show_default="this machine",
        help=f"With --dry-run: plan for GPUs that are not here, as many as --devices says: {', '.join(CARDS)}.",
    ),
    click.option(
        "--devices-per-host",
        type=click.IntRange(min=1, max=1024),
        metavar="N",
        show_default=str(_DEVICES_PER_HOST),
        help="With --target: number of GPUs in each machine.",
    ),
    click.option(
        "--rate",
        type=click.FloatRange(min=0, min_open=True, max=1e9),
        metavar="IMAGES/S",
        show_default="unknown",
        help="With --dry-run: images per second that one device trains on.",
    ),
)


def check_plan_options(params: Mapping[str, Any]) -> None:
    """Raise ValueError if an option of the plan lacks the option that it needs, or excludes another that is given."""
    for name, needed in (("target", "dry_run"), ("rate", "dry_run"), ("devices_per_host", "target")):
        if params[name] is not None and not params[needed]:
            raise ValueError(f"{_option(name)} is only for {_option(needed)}: give that too, or leave it out")
    if params["rate"] is not None and not math.isfinite(params["rate"]):
        raise ValueError(f"--rate must be a number of images per second, got {params['rate']}: give the measured one")
    if params["target"] is not None:
        for name in ("spawn", "coordinator"):
            if params[name] is not None:
                raise ValueError(
                    f"--target plans for other machines, but {_option(name)} starts or joins processes here: leave one "
                    "out; --devices says how many devices there are"
                )


def print_plan(config: TrainConfig, parts: "UserParts", names: Mapping[str, str], params: Mapping[str, Any]) -> None:
    """Make the plan of a run, and print it."""
    from loopfeed.engine.processes import this_process
    from loopfeed.engine.sizing.plan import plan_lines
    from loopfeed.engine.sizing.planning import plan_for_cards, plan_here

    if params["target"] is None:
        plan = plan_here(config, parts, click.echo, params["rate"])
    else:
        from loopfeed.engine.commands.compile_for_cards import PROGRAM

        target = _target(config, params)
        plan = plan_for_cards(config, parts, names, target, click.echo, program=PROGRAM, device_rate=params["rate"])
    # Of several processes, all open the run, and the first alone prints.
    if this_process().index == 0:
        click.echo("\n".join(["", *plan_lines(plan)]))


def _target(config: TrainConfig, params: Mapping[str, Any]) -> "Target":
    from loopfeed.engine.data.dataset import choose_data
    from loopfeed.engine.sizing.planning import Target

    if not config.synthetic and params["batches"] is None and choose_data(config.data).is_demo:
        raise SettingError(
            "data",
            "a plan for other machines needs {setting}, got none: give it, or --synthetic, like ImageNet",
        )
    platform, count = (None, 1) if config.devices is None else parse_devices(config.devices)
    if platform is not None:
        raise SettingError("devices", "with --target, {setting} must be a number, got {found}", found=config.devices)
    per_host = params["devices_per_host"] or _DEVICES_PER_HOST
    if count > per_host and count % per_host:
        raise SettingError(
            "devices",
            "every host has as many devices, so {setting} must be a multiple of --devices-per-host, {per_host}, got "
            "{found}: change one of them",
            per_host=per_host,
            found=count,
        )
    return Target(params["target"], count, per_host)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
