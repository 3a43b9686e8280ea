"""The command `run-train`: options to settings, the loss stream to the terminal, errors to one line."""

import io
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from engine.augmentation import CropName
from engine.config import OptimizerName, PrecisionName, ScheduleName, TrainConfig
from preprocess.grouped_help import GroupedCommand

if TYPE_CHECKING:
    from engine.result import DryRun, TrainResult
    from engine.sinks import Sink

_FLUSH_TIMEOUT_S = 1.0
_DONE, _FAILED, _WRONG_USAGE, _STOPPED = 0, 1, 2, 130
_DEFAULTS = TrainConfig()


_GROUPS = {
    "Data": ("data", "split", "eval_split", "synthetic", "image_size", "num_classes"),
    "Training": (
        "steps",
        "batch",
        "eval_every_steps",
        "stop_at_top1",
        "model",
        "init_from",
        "precision",
        "seed",
        "label_smoothing",
        "ema_decay",
        "skip_nonfinite",
        "stop_on_nan",
    ),
    "Optimiser": (
        "optimizer",
        "learning_rate",
        "schedule",
        "warmup_steps",
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
    "Infeed": ("prefetch", "reader_threads", "infeed_timeout_s", "transport"),
    "Output": ("run_dir", "resume", "snapshot_every_steps", "keep_snapshots", "overwrite", "traceback"),
    "Compilation": ("compilation_cache", "dump_hlo", "dry_run"),
}
# Click keeps the line breaks of a paragraph that begins with a backspace.
_EPILOG = """\b
Examples:
  run-train --steps 1000 --batch 128
  run-train --data data/shards --model resnet50 --steps 450000 --batch 256
  run-train --synthetic --model resnet18 --image-size 64 --steps 100
"""


@click.command(
    cls=GroupedCommand,
    option_groups=_GROUPS,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.option("--steps", type=int, default=_DEFAULTS.steps, metavar="N", help="Updates to make.")
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
@click.option(
    "--stop-at-top1", type=float, metavar="0…1", show_default="never", help="End at the evaluation that reaches it."
)
@click.option("--synthetic", is_flag=True, help="Random batches drawn on the host; needs no data set.")
@click.option(
    "--model",
    default=_DEFAULTS.model,
    metavar="NAME",
    help="resnet18, 34, 50, 101, 152 or resnet50-xlajl; resnet8, 14, 20, 32, 44, 56 or 110 for small images; "
    "auto is resnet50 from 128 px, resnet8 below.",
)
@click.option("--num-classes", type=int, metavar="K", show_default="the data's", help="Outputs of the model.")
@click.option(
    "--image-size",
    type=int,
    metavar="PX",
    show_default="the data's",
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
    type=float,
    metavar="RATE",
    show_default="0.1 · batch / 256",
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
@click.option("--cycle-momentum", is_flag=True, help="Momentum 0.95 to 0.85 and back against the one-cycle rate.")
@click.option(
    "--momentum", type=float, default=_DEFAULTS.momentum, metavar="0…1", help="The first beta of adamw and lamb."
)
@click.option("--beta2", type=float, default=_DEFAULTS.beta2, metavar="0…1", help="Of adamw and lamb.")
@click.option("--weight-decay", type=float, default=_DEFAULTS.weight_decay, metavar="RATE", help="On kernels.")
@click.option("--decay-all", is_flag=True, help="Weight decay on norms and biases too.")
@click.option("--clip-norm", type=float, metavar="NORM", show_default="none", help="Largest norm of the gradient.")
@click.option(
    "--accumulate-steps", type=int, default=_DEFAULTS.accumulate_steps, metavar="BATCHES", help="Batches an update."
)
@click.option(
    "--ema-decay", type=float, metavar="0…1", show_default="none", help="Average the weights; evaluate and keep that."
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
    "--crop",
    type=click.Choice(get_args(CropName)),
    default=_DEFAULTS.crop,
    help="centre, random, or resized (random area and aspect).",
)
@click.option("--crop-padding", type=int, default=_DEFAULTS.crop_padding, metavar="PX", help="Before a random crop.")
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
@click.option("--prefetch", type=int, default=_DEFAULTS.prefetch, metavar="BATCHES", help="Batches read ahead.")
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
    type=click.Choice(["auto", "inplace", "callback"]),
    default=_DEFAULTS.transport,
    help="How batches cross to the device.",
)
@click.option(
    "--run-dir", metavar="DIR", show_default="runs/<date>-<time>", help="Where config, losses and weights go."
)
@click.option(
    "--resume", is_flag=True, help="Continue the run in --run-dir from its newest snapshot, to the same bits."
)
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
def main(*, dry_run: bool, traceback: bool, **options: Any) -> None:
    """Train an image classifier in one compiled program.

    Batches stream in and losses stream out while a single while-loop trains on the device. Exit codes: 0 done, 1 the
    run failed, 2 wrong usage or data, 130 stopped by SIGINT or SIGTERM.
    """
    try:
        if dry_run:
            _show(_plan(TrainConfig(**options)))
            code = _DONE
        else:
            code = _train(TrainConfig(**options))
    except KeyboardInterrupt:
        _say_to_stderr("run-train: stopped at once; no weights were written")
        code = _STOPPED
    except Exception as error:
        if traceback:
            raise
        _say_to_stderr(f"run-train: {_describe(error)}")
        code = _WRONG_USAGE if isinstance(error, ValueError) else _FAILED
    _leave(code)


def _leave(code: int) -> None:
    """Exits; after a stop or failure at once, since a thread stuck in a source or a compiler can't be joined."""
    # Where nobody reads, a flush waits for ever, or for the lock of the thread that does, which no signal ends.
    flusher = threading.Thread(target=_flush, daemon=True)
    flusher.start()
    flusher.join(_FLUSH_TIMEOUT_S)
    if code != _DONE or flusher.is_alive():
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed by the shell
            continue
        # A full disk or a closed pipe: either it is the failure that is being told, or there is nobody to tell.
        with suppress(OSError):
            stream.flush()


def _say_to_stderr(text: str) -> None:
    with suppress(OSError):
        click.echo(text, err=True)


def _describe(error: Exception) -> str:
    """Gives the error in a line or two; one that is no rule of ours says where the rest is."""
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    text = str(error).strip()
    if isinstance(error, BrokenPipeError):
        text = "the reader of the loss stream went away (broken pipe); the run ended at its next step"
    elif "RESOURCE_EXHAUSTED" in text:
        text = f"{text.splitlines()[0]}: the program needs more memory than there is; a smaller --batch needs less"
    elif not isinstance(error, ValueError | OSError | RuntimeError | ArithmeticError) or not text:
        text = f"{type(error).__name__}: {text} (--traceback shows where)"
    return f"{text}{notes}"


@contextmanager
def _run_dir(named: str | None) -> Iterator[str]:
    """Gives the folder that was named, or makes a new one called by the time; one that stays empty is removed."""
    if named is not None:
        yield named
        return
    is_first = not Path("runs").exists()
    made = _make_run_dir()
    try:
        yield os.fspath(made)
    finally:
        with suppress(OSError):
            made.rmdir()
            if is_first:
                made.parent.rmdir()


def _make_run_dir() -> Path:
    """Makes a folder under runs/; runs that start in the same second get different ones."""
    stem = time.strftime("%Y%m%d-%H%M%S")
    Path("runs").mkdir(exist_ok=True)
    for number in itertools.count(1):
        path = Path("runs", stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError


def _plan(config: TrainConfig) -> "DryRun":
    from engine.run import plan_run

    return plan_run(config, notify=click.echo)


def _show(plan: "DryRun") -> None:
    memory = plan.compiled.memory_bytes
    for kind, size_bytes in memory.items():
        click.echo(f"memory, {kind}: {size_bytes / 1e6:,.1f} MB")
    click.echo(f"memory, batches read ahead (host): {plan.ring_bytes / 1e6:,.1f} MB")
    there = "" if plan.host_bytes is None else f" (this machine has {plan.host_bytes / 1e6:,.0f} MB)"
    click.echo(f"memory, in all: {(plan.compiled.peak_bytes + plan.ring_bytes) / 1e6:,.1f} MB{there}")
    flops = plan.compiled.step_flops
    click.echo(f"work: {flops / 1e9:,.2f} GFLOP a step" if flops is not None else "work: XLA gives no count here")
    click.echo("dry run: nothing was trained")


def _train(config: TrainConfig) -> int:
    from engine.run import train

    sink, notify = _terminal(config)
    with _run_dir(config.run_dir) as run_dir:
        result = train(replace(config, run_dir=run_dir), sinks=[sink], notify=notify)
    _summarise(result)
    return _DONE if result.stopped_by == "steps" else _STOPPED


def _terminal(config: TrainConfig) -> "tuple[Sink, Callable[[str], None]]":
    """Gives the loss stream's sink and the way to say something beside it: for a person, or for a pipe."""
    if sys.stdout is not None and sys.stdout.isatty():
        from rich.console import Console

        from engine.terminal import ProgressSink

        # One console for both, so that what is said while the progress line stands goes above it.
        console = Console()
        say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        return ProgressSink(console, steps=config.steps, batch=config.batch), say
    from engine.sinks import PlainSink

    return PlainSink(sys.stdout or io.StringIO(), steps=config.steps), click.echo


def _summarise(result: "TrainResult") -> None:
    steps = f"{result.steps_done:,} step{'' if result.steps_done == 1 else 's'}"
    how = "done" if result.stopped_by == "steps" else f"stopped by {result.stopped_by}"
    line = f"{how}: {steps} in {result.train_s:.1f} s"
    if len(result.losses):
        last = result.losses[-min(100, len(result.losses)) :]
        line += (
            f", final loss {result.losses[-1]:.4f} (mean of the last {len(last)}: {last.mean():.4f}), "
            f"infeed wait {100 * result.wait_s / result.train_s:.1f} % of the time"
        )
    click.echo(line)
    click.echo(f"run folder: {result.run_dir}")
