"""The `tail-run` command, which shows the loss of a run in another terminal while the run trains.

Owns waiting, ending, and the order of the output. Must not know: jax, or how the run is trained.
numpy and rich are imported where they are first needed, so that `--help` answers at once.
"""

import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from loopfeed.engine.commands.followed_run import (
    FollowedRun,
    RunKilledError,
    RunNotFoundError,
    RunSilentError,
    RunSource,
    await_runs,
    follow,
    open_source,
)
from loopfeed.engine.commands.held_signals import signals_held
from loopfeed.engine.commands.run_names import distinct_names
from loopfeed.engine.commands.tail_frame import Picture, Tick, frame_text, records_of
from loopfeed.preprocess.commands.completion import complete_folder
from loopfeed.preprocess.commands.guarded_output import GuardedCommand, terminal_of
from loopfeed.preprocess.commands.output_stream import OutputStream
from loopfeed.preprocess.commands.storage import storage_option
from loopfeed.preprocess.commands.suggesting import LOG_EVERY_ELSEWHERE, NamedElsewhere, refuse_nan
from loopfeed.preprocess.printable import printable_line
from loopfeed.preprocess.system_errors import describe_system_error, is_out_of_room, reading_remedy

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from loopfeed.engine.records.loss_log import LossRows, RunEnd
    from loopfeed.engine.stream.sinks import EvaluationRecord, LineChoice, LossRecord

_MOST_RUNS = 26  # one letter each


class _WrongRunError(click.ClickException):
    exit_code = 2


def _above(low: float, high: float | None = None) -> click.FloatRange:
    return click.FloatRange(min=low, min_open=True, max=high)


@click.command(cls=GuardedCommand)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, shell_complete=complete_folder)
@click.option("--once", is_flag=True, help="Show the current state and exit.")
@click.option(
    "--interval", type=_above(0, 60), default=0.5, show_default=True, metavar="S", callback=refuse_nan,
    help="Seconds between reads of the log.",
)  # fmt: skip
@click.option(
    "--smoothing", type=click.FloatRange(0, 1, max_open=True), default=0.9, show_default=True, callback=refuse_nan,
    help="Weight of the past in the smoothed loss; 0 turns smoothing off.",
)  # fmt: skip
@click.option("--last", type=click.IntRange(min=1), metavar="STEPS", help="Show only the last STEPS steps.")
@click.option(
    "--log-every",
    cls=NamedElsewhere,
    also_called=LOG_EVERY_ELSEWHERE,
    type=click.IntRange(min=1),
    metavar="STEPS",
    show_default="every step with --last, else every 5 seconds",
    help="Print a plain line every STEPS steps, without a chart.",
)
@click.option("--log-scale", is_flag=True, help="Use a logarithmic loss axis.")
@click.option(
    "--width",
    type=click.IntRange(min=1),
    metavar="COLUMNS",
    help="Width of the chart.  [default: the terminal's width]",
)
@click.option(
    "--height",
    type=click.IntRange(min=1),
    metavar="LINES",
    help="Height of the chart.  [default: the terminal's height]",
)
@click.option(
    "--timeout-s", type=_above(0), default=600.0, show_default=True, metavar="S", callback=refuse_nan,
    help="Give up if the run writes nothing for S seconds; 'inf' waits forever.",
)  # fmt: skip
@storage_option
def main(
    runs: tuple[str, ...],
    once: bool,
    interval: float,
    smoothing: float,
    last: int | None,
    log_every: int | None,
    log_scale: bool,
    width: int | None,
    height: int | None,
    timeout_s: float,
    storage_option: tuple[str, ...],
) -> None:
    """Show the loss of the run in folder RUN as a live chart or, if stdout is not a terminal, in plain lines.

    Several runs are drawn over the same axes, each marked with its letter, above a line for each run with its name,
    step, smoothed loss and state; plain lines begin with the name of the run.

    --smoothing, --log-scale, --width and --height affect only the chart, which needs a terminal that is not dumb. The
    plain lines are those that run-train prints.

    RUN may be the URL of a run in an object store, to which new lines come every 10 seconds.

    Exits when the run ends. If RUN is just starting, waits up to 15 seconds for its folder, up to --timeout-s while it
    compiles, and up to --timeout-s for its first step. Of several runs, the first must start in this time; the others
    may appear later, and are waited for up to --timeout-s.

    Exit codes: 0 the run ended (or --once), 1 the run was killed or silent for --timeout-s, 2 RUN is not a run folder,
    130 Ctrl-C.
    """
    try:
        with contextlib.ExitStack() as stack:
            _check_runs(runs)
            sources = [stack.enter_context(open_source(run, storage_option)) for run in runs]
            is_drawn = log_every is None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
            console = partial(_open_console, width, height) if is_drawn else None
            show = partial(_new_picture, smoothing=smoothing, last=last, log_scale=log_scale)
            every = 1 if log_every is None and last is not None else log_every
            _show(sources, console, show, partial(LinePrinter, last, once, every), once, interval, timeout_s)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        OutputStream(terminal_of(sys.stdout)).drop()
    except RunNotFoundError as error:
        raise _WrongRunError(printable_line(str(error))) from error
    except (RunSilentError, RunKilledError) as error:
        if once:
            click.echo(printable_line(str(error)), err=True)
            return
        raise click.ClickException(printable_line(str(error))) from error
    except ValueError as error:  # the store
        raise click.ClickException(printable_line(str(error))) from error
    except OSError as error:
        if is_out_of_room(error):  # the output, because nothing else is written
            raise click.ClickException(printable_line(describe_system_error(error, "<stdout>"))) from error
        path = error.filename or " ".join(runs)
        remedy = reading_remedy(error, "check the path")
        reason = f"RUN must be readable, but {path} is not: {error.strerror}; {remedy}"
        raise _WrongRunError(printable_line(reason)) from error


def _check_runs(runs: Sequence[str]) -> None:
    """Raise RunNotFoundError if there are too many runs to tell apart, or one is given twice."""
    if len(runs) > _MOST_RUNS:
        raise RunNotFoundError(f"at most {_MOST_RUNS} runs can be shown together, got {len(runs)}: give fewer")
    twice = [run for index, run in enumerate(runs) if os.path.normpath(run) in map(os.path.normpath, runs[:index])]
    if twice:
        raise RunNotFoundError(f"every RUN must be another one, but {twice[0]} is given twice: leave one out")


def _open_console(width: int | None, height: int | None) -> "Console":
    from rich.console import Console

    return Console(file=terminal_of(sys.stdout), width=width, height=height, highlight=False)


def _new_picture(name: str, *, smoothing: float, last: int | None, log_scale: bool) -> Picture:
    from loopfeed.engine.commands.binned_losses import BinnedLosses
    from loopfeed.engine.records.loss_log import RunFacts

    return Picture(name, BinnedLosses(smoothing, last), RunFacts(), log_scale)


def _show(
    sources: Sequence[RunSource],
    open_console: "Callable[[], Console] | None",
    new_picture: Callable[[str], Picture],
    new_printer: "Callable[[str], LinePrinter]",
    once: bool,
    interval_s: float,
    timeout_s: float,
) -> None:
    """Follow the runs, as frames or as lines, until nothing more comes; raise the errors of those that did not end."""
    await_runs(sources, once, timeout_s)
    runs, names = [FollowedRun(source) for source in sources], distinct_names([source.name for source in sources])
    ticks = follow(runs, once, interval_s, timeout_s)
    if open_console is None:
        printers = [new_printer(f"{name}: " if len(runs) > 1 else "") for name in names]
        for number, tick in ticks:
            printers[number].print(tick)
    else:
        console = open_console()
        shown = list(map(new_picture, names))

        def update(news: tuple[int, Tick]) -> bool:
            number, tick = news
            one, run = shown[number], runs[number]
            one.update(tick)
            one.exists, one.is_killed, one.is_silent = run.exists, run.is_killed, run.is_silent(timeout_s)
            return tick.caught_up and number == len(runs) - 1

        _draw_frames(console, ticks, update, partial(frame_text, shown, console), once, interval_s)
    errors = [run.error(timeout_s) for run in runs]
    if found := [error for error in errors if error is not None]:
        raise type(found[0])("; ".join(map(str, found)))


class LinePrinter:
    """Prints the lines of one run.

    Args:
        last: print only this many of the steps that there are at first; None prints all.
        once: whether nothing is read after the first pass over the log.
        every: steps between lines, None for a line every few seconds.
        prefix: what each line begins with.
    """

    def __init__(self, last: int | None, once: bool, every: int | None = 1, prefix: str = "") -> None:
        self._last, self._once, self._prefix = last, once, prefix
        self._every, self._choice = every, _line_choice(every)
        self._left_out: LossRecord | None = None
        self._held: LossRows | None = None  # with `last`, the newest rows during the first pass over the log
        self._is_printing = last is None
        self._waiting: deque[EvaluationRecord] = deque()  # read already, although the step that they follow is not
        self._num_evaluations, self._newest = 0, -1
        self._end: RunEnd | None = None

    def print(self, tick: Tick) -> None:
        """Print what is new."""
        rows, batch = tick.batch.rows, tick.batch
        if batch.restarted:
            self._tell("loss.jsonl was replaced; reading it from the start")
        if batch.restarted or len(tick.evaluations) < self._num_evaluations:
            self._waiting.clear()
            self._num_evaluations, self._left_out, self._choice = 0, None, _line_choice(self._every)
        self._waiting.extend(tick.evaluations[self._num_evaluations :])
        self._num_evaluations = len(tick.evaluations)
        if batch.num_unreadable:
            where = f"loss.jsonl, the last of them line {batch.last_unreadable_line}"
            self._tell(f"skipped {batch.num_unreadable} unreadable line(s) of {where}")
        if not self._is_printing and self._last is not None:
            self._held = rows = (rows if self._held is None else self._held.followed_by(rows)).tail(self._last)
            self._is_printing = tick.caught_up
            while self._is_printing and len(rows) and self._waiting and self._waiting[0].step < rows.step[0]:
                self._waiting.popleft()
        if self._is_printing:
            self._newest = int(rows.step[-1]) if len(rows) else self._newest
            is_last = tick.caught_up and (self._once or tick.end is not None)
            up_to_step = math.inf if is_last else self._newest
            lines = self._lines(rows, tick.facts.steps, up_to_step, is_last=is_last)
            click.echo("".join(f"{self._prefix}{line}\n" for line in lines), nl=False)
        if tick.end is not None and tick.end != self._end:
            self._tell(tick.end.line())
        self._end = tick.end

    def _lines(self, rows: "LossRows", steps: int | None, up_to_step: float, *, is_last: bool) -> Iterator[str]:
        """Yield the lines that `run-train` prints for rows and for the evaluations that wait, in order of step.

        Args:
            rows: the next rows.
            steps: the number of steps of the whole run, None if unknown.
            up_to_step: yield evaluations up to this step; later ones stay.
            is_last: whether nothing follows, so that the last step has a line.
        """
        from loopfeed.engine.stream.sinks import evaluation_words, loss_fields

        waiting = self._waiting
        for record in records_of(rows):
            while waiting and waiting[0].step < record.step:
                yield evaluation_words(waiting.popleft())
            is_taken = self._choice.takes(record.step, record.time)
            self._left_out = None if is_taken else record
            if is_taken:
                yield "  ".join(loss_fields(record, steps))
        if is_last and self._left_out is not None:
            yield "  ".join(loss_fields(self._left_out, steps))
            self._left_out = None
        while waiting and waiting[0].step <= up_to_step:
            yield evaluation_words(waiting.popleft())

    def _tell(self, message: str) -> None:
        click.echo(f"{self._prefix}{message}", err=True)


def _line_choice(every: int | None) -> "LineChoice":
    from loopfeed.engine.stream.sinks import LineChoice

    return LineChoice(every)


def _draw_frames[T](
    console: "Console",
    ticks: Iterable[T],
    update: Callable[[T], bool],
    frame: "Callable[[int], Text]",
    once: bool,
    interval_s: float,
) -> None:
    """Redraw the chart on the alternate screen at each tick; at the end, print the last frame on the normal screen.

    Args:
        console: where to draw.
        ticks: what was read.
        update: called with each tick; returns whether nothing is left to read.
        frame: returns the frame for a number of lines.
        once: whether only the last frame is shown.
        interval_s: the longest time between frames while much is left to read.
    """
    from rich.live import Live

    # `--once` prints its only frame below, without flashing the alternate screen.
    screen = contextlib.nullcontext() if once else Live(console=console, screen=True, auto_refresh=False)
    drawn_s = -math.inf
    # An interrupted frame would leave the terminal on its alternate screen without a cursor.
    with signals_held() as signals:
        try:
            with screen as live:
                for tick in signals.let_in(ticks):
                    caught_up = update(tick)
                    if live is not None and (caught_up or time.monotonic() - drawn_s >= interval_s):
                        live.update(frame(console.height), refresh=True)
                        drawn_s = time.monotonic()
        finally:
            # Leave one line for the shell's prompt.
            console.print(frame(max(1, console.height - 1)))
