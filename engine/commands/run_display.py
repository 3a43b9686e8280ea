"""How `run-train` shows a run: what a dry run found, the loss stream, the last lines."""

import io
import shlex
import sys
from typing import TYPE_CHECKING

import click

from engine.commands.command_end import say_on_terminal
from engine.config import TrainConfig
from preprocess.commands.guarded_output import terminal_of

if TYPE_CHECKING:
    from rich.console import Console

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


class LossDisplay:
    """Shows a run on standard output: a progress line to a person, plain lines to a pipe."""

    def __init__(self) -> None:
        # One console for both, so that a notice appears above the progress line.
        self._console = _terminal() if sys.stdout is not None and sys.stdout.isatty() else None

    def notify(self, line: str) -> None:
        """Print a line beside the losses."""
        if self._console is None:
            click.echo(line)
        else:
            say_on_terminal(self._console, line)

    def make_sink(self, config: TrainConfig) -> "Sink":
        """Return the sink of the loss stream for a run with these settings."""
        if self._console is None:
            from engine.stream.sinks import PlainSink

            return PlainSink(sys.stdout or io.StringIO(), steps=config.steps)
        from engine.commands.terminal import ProgressSink

        return ProgressSink(self._console, steps=config.steps, batch=config.batch)


def _terminal() -> "Console":
    from rich.console import Console

    return Console(file=terminal_of(sys.stdout))


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
