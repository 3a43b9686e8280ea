"""How `run-train` shows a run: what a dry run found, the loss stream, the last lines."""

import io
import shlex
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import click

from engine.commands.command_end import say_on_terminal
from engine.config import TrainConfig
from preprocess.commands.guarded_output import terminal_of

if TYPE_CHECKING:
    from engine.run.result import DryRun, TrainResult
    from engine.stream.sinks import Sink


def show_plan(plan: "DryRun") -> None:
    """Prints what a dry run found: memory and work."""
    memory = plan.compiled.memory_bytes
    for kind, size_bytes in memory.items():
        click.echo(f"memory, {kind}: {size_bytes / 1e6:,.1f} MB")
    click.echo(f"memory, batches read ahead (host): {plan.ring_bytes / 1e6:,.1f} MB")
    needed, has = plan.compiled.peak_bytes + plan.ring_bytes, plan.host_bytes
    there = "" if has is None else f" ({'too much: ' * (needed > has)}this machine has {has / 1e6:,.0f} MB)"
    click.echo(f"memory, in all: {needed / 1e6:,.1f} MB{there}")
    flops = plan.compiled.step_flops
    click.echo(f"work: {flops / 1e9:,.2f} GFLOP a step" if flops is not None else "work: XLA gives no count here")
    click.echo("dry run: nothing was trained")


def loss_display(config: TrainConfig) -> "tuple[Sink, Callable[[str], None]]":
    """Gives the loss stream's sink and the way to say something beside it: for a person, or for a pipe."""
    if sys.stdout is not None and sys.stdout.isatty():
        from rich.console import Console

        from engine.commands.terminal import ProgressSink

        # One console for both, so that what is said while the progress line stands goes above it.
        console = Console(file=terminal_of(sys.stdout))
        return ProgressSink(console, steps=config.steps, batch=config.batch), partial(say_on_terminal, console)
    from engine.stream.sinks import PlainSink

    return PlainSink(sys.stdout or io.StringIO(), steps=config.steps), click.echo


def summarise(result: "TrainResult") -> None:
    """Prints how a run ended, and where it left its files."""
    steps = f"{result.steps_done:,} step{'' if result.steps_done == 1 else 's'}"
    if result.steps_done != len(result.losses):
        steps += f", {len(result.losses):,} of them"
    how = {"steps": "done", "top1": "done, its top-1 reached"}.get(result.stopped_by, f"stopped by {result.stopped_by}")
    line = f"{how}: {steps} in {result.train_s:.1f} s"
    if len(result.losses):
        last = result.losses[-min(100, len(result.losses)) :]
        line += (
            f", final loss {result.losses[-1]:.4f} (mean of the last {len(last)}: {last.mean():.4f}), "
            f"infeed wait {100 * result.wait_s / result.train_s:.1f} % of the time"
        )
    click.echo(line)
    if result.num_skipped:
        click.echo(f"skipped: {result.num_skipped:,} updates, whose gradients were not finite")
    click.echo(f"run folder: {result.run_dir}")
    if not result.is_complete and result.snapshot_step is not None:
        click.echo(f"to go on: run-train --run-dir {shlex.quote(str(result.run_dir))} --resume")
