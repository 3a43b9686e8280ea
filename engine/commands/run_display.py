"""The terminal output of `run-train`: the losses of a run, and its summary."""

import io
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loopfeed.engine.commands.command_end import say_in_time, say_on_terminal
from loopfeed.engine.config import ProfileFormat, TrainConfig
from loopfeed.engine.peers import SEES_ALL
from loopfeed.engine.processes import this_process
from loopfeed.preprocess.commands.guarded_output import terminal_of
from loopfeed.preprocess.quantities import quantity

if TYPE_CHECKING:
    from rich.console import Console

    from loopfeed.engine.run.result import TrainResult
    from loopfeed.engine.stream.sinks import Sink


# For whoever reads the summary: a pager may be paused. A signal asked for an end at once.
_READER_S, _STOPPED_S = 30.0, 1.0
_COPIED = ("to resume: ", "run folder: ")


class LossDisplay:
    """The display of a run on stdout: a progress line on a terminal, plain lines if stdout is redirected.

    Args:
        log_every: steps between plain lines, on a terminal too; None is a progress line on a terminal, and a line every
            few seconds elsewhere.
        is_quiet: whether to show only warnings.
    """

    def __init__(self, log_every: int | None = None, *, is_quiet: bool = False) -> None:
        self._log_every, self._is_quiet = log_every, is_quiet
        # One console for both, so that a notice appears above the progress line.
        is_drawn = log_every is None and not is_quiet and sys.stdout is not None and sys.stdout.isatty()
        self._console = _terminal() if is_drawn else None

    def notify(self, line: str) -> None:
        """Print a message without disturbing the display of the losses."""
        if self._is_quiet and not line.startswith("warning"):
            return
        if self._console is not None:
            say_on_terminal(self._console, line)
        else:
            click.echo(line)

    def make_sinks(self, config: TrainConfig) -> "list[Sink]":
        """Return the sinks that display the losses of a run with these settings."""
        if self._is_quiet:
            return []
        if self._console is None:
            from loopfeed.engine.stream.sinks import PlainSink

            return [PlainSink(sys.stdout or io.StringIO(), steps=config.steps, every=self._log_every)]
        from loopfeed.engine.commands.terminal import ProgressSink

        return [ProgressSink(self._console, steps=config.steps, image_at=config.step_ranges.image_at)]

    def summarise(self, result: "TrainResult", config: TrainConfig) -> None:
        """Print how a run with these settings ended."""
        report = config.runtime_report
        summarise(result, config.profile_format, runtime_report=report, is_quiet=self._is_quiet)


def _terminal() -> "Console":
    from rich.console import Console

    return Console(file=terminal_of(sys.stdout))


def _processes() -> str:
    """Return the option with which a resume has as many processes, if they were started together."""
    count = this_process().count
    if count == 1:
        return ""
    return f" --spawn {count}" if SEES_ALL in os.environ else " (on each machine, with the same --coordinator options)"


def summarise(
    result: "TrainResult",
    profile_format: ProfileFormat = "plain",
    *,
    runtime_report: bool = False,
    is_quiet: bool = False,
) -> None:
    """Print how a run ended, its final loss, its folder, what bound it, and how to resume it if it is incomplete.

    Args:
        result: the result of the run; its profile is printed if it has one.
        profile_format: the format of the profile.
        runtime_report: whether to print what the runtime did, too.
        is_quiet: whether to print one line on how it ended, with its folder, and a second one only to resume it.
    """
    from loopfeed.engine.records.loss_log import COMPLETE_ENDS, end_words
    from loopfeed.engine.run.result import described_losses

    steps = quantity(result.steps_done, "step")
    if result.steps_done != len(result.losses):
        steps += f", {len(result.losses):,} of them"
    line = f"{end_words(result.stopped_by)}: {steps} in {result.train_s:.1f} s"
    if len(result.losses):
        line += (
            f", final loss {described_losses(result.losses)}, "
            f"infeed wait {100 * result.wait_s / result.train_s:.1f} % of the time"
        )
    lines = [line]
    if result.num_skipped:
        lines.append(f"skipped: {quantity(result.num_skipped, 'update')} with NaN or infinite gradients or weights")
    place, here = str(result.run_dir), Path.cwd()
    if isinstance(result.run_dir, Path) and result.run_dir.is_relative_to(here):
        place = os.fspath(result.run_dir.relative_to(here))
    if is_quiet:
        lines = [f"{lines[0]}; run folder: {place}"]
    else:
        lines.append(f"run folder: {place}")
    verdict = None if is_quiet else result.runtime.verdict
    # The report has it, too.
    if verdict is not None and len(result.losses) and not runtime_report:
        lines.append(f"verdict: {verdict.line}")
    if not result.is_complete and result.snapshot_step is not None:
        lines.append(f"to resume: run-train --run-dir {shlex.quote(place)} --resume{_processes()}")
    width = shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None
    if width is not None:
        from loopfeed.engine.runtime.report import wrap_words

        # A command or a path that is copied must not have line breaks of ours.
        lines = [each if each.startswith(_COPIED) else wrap_words(each, width) for each in lines]
    # The summary comes last, where it stays on the screen.
    tables = _tables(result, profile_format, width, runtime_report=runtime_report)
    text = "\n".join([*tables, *lines])
    say_in_time(text, _READER_S if result.stopped_by in (*COMPLETE_ENDS, "callback") else _STOPPED_S)


def _tables(
    result: "TrainResult", profile_format: ProfileFormat, width: int | None, *, runtime_report: bool
) -> Iterator[str]:
    """Yield the profile and the runtime report that the user asked for."""
    if result.profile is not None:
        from loopfeed.engine.profile.formats import format_profile

        yield format_profile(result.profile, profile_format)
    if runtime_report:
        from loopfeed.engine.runtime.report import describe_runtime

        yield describe_runtime(result.runtime, min(80, width or 80)) + "\n"
