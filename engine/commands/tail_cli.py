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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from engine.commands.held_signals import signals_held
from engine.commands.tail_frame import Picture, Tick, end_text, frame_text, records_of
from preprocess.commands.completion import complete_folder
from preprocess.commands.guarded_output import GuardedCommand, terminal_of
from preprocess.commands.storage import storage_option
from preprocess.printable import printable_line
from preprocess.storage_options import is_url, parse_pairs
from preprocess.system_errors import describe_system_error, is_out_of_room

if TYPE_CHECKING:
    from rich.console import Console

    from engine.records.loss_log import LossRows
    from engine.stream.sinks import EvaluationRecord

_START_WAIT_S = 5.0  # run-train imports jax before it creates its folder
_POLL_START_S = 0.1


class _Source(NamedTuple):
    """The folder to read a run from, its name for messages, and a function to call before each reading."""

    folder: Path
    name: str
    refresh: Callable[[], None]


class RunNotFoundError(ValueError):
    """RUN is not a run folder, or its run has not started to train yet."""


class RunSilentError(ValueError):
    """The run has written nothing for longer than the time limit."""


class RunKilledError(ValueError):
    """The process of the run died without writing a result."""


class _WrongRunError(click.ClickException):
    exit_code = 2


def _refuse_nan(_context: click.Context, parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):
        raise click.BadParameter("must be a number, got nan; leave it out to use the default", param=parameter)
    return value


def _above(low: float, high: float | None = None) -> click.FloatRange:
    return click.FloatRange(min=low, min_open=True, max=high)


@click.command(cls=GuardedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", shell_complete=complete_folder)
@click.option("--once", is_flag=True, help="Show the current state and exit.")
@click.option(
    "--interval", type=_above(0, 60), default=0.5, show_default=True, metavar="S", callback=_refuse_nan,
    help="Seconds between reads of the log.",
)  # fmt: skip
@click.option(
    "--smoothing", type=click.FloatRange(0, 1, max_open=True), default=0.9, show_default=True, callback=_refuse_nan,
    help="Weight of the past in the smoothed loss; 0 turns smoothing off.",
)  # fmt: skip
@click.option("--last", type=click.IntRange(min=1), metavar="STEPS", help="Show only the last STEPS steps.")
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
    "--timeout-s", type=_above(0), default=600.0, show_default=True, metavar="S", callback=_refuse_nan,
    help="Give up if the run writes nothing for S seconds; 'inf' waits forever.",
)  # fmt: skip
@storage_option
@click.version_option(package_name="feedloop")
def main(
    run: str,
    once: bool,
    interval: float,
    smoothing: float,
    last: int | None,
    log_scale: bool,
    width: int | None,
    height: int | None,
    timeout_s: float,
    storage_option: tuple[str, ...],
) -> None:
    """Show the loss of the run in folder RUN as a live chart or, if stdout is not a terminal, one plain line per step.

    --smoothing, --log-scale, --width and --height affect only the chart, which needs a terminal that is not dumb. The
    plain lines are those that run-train prints.

    RUN may be the URL of a run in an object store, to which new lines come every 10 seconds.

    Exits when the run ends. If RUN is just starting, waits up to 5 seconds for its folder, up to --timeout-s while it
    compiles, and up to --timeout-s for its first step.

    Exit codes: 0 the run ended (or --once), 1 the run was killed or silent for --timeout-s, 2 RUN is not a run folder,
    130 Ctrl-C.
    """
    try:
        with _open_source(run, storage_option) as source:
            _await_run(source, once, timeout_s)
            ticks = _ticks(source, once, interval, timeout_s)
            if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
                _print_lines(ticks, last, once)
                return
            from rich.console import Console

            from engine.commands.binned_losses import BinnedLosses
            from engine.records.loss_log import RunFacts

            picture = Picture(Path(run), BinnedLosses(smoothing, last), RunFacts(), log_scale)
            _draw_frames(
                Console(file=terminal_of(sys.stdout), width=width, height=height, highlight=False),
                ticks,
                picture,
                once,
                interval,
            )
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        _drop_stdout()
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
        path = error.filename or run
        reason = f"RUN must be readable, but {path} is not: {error.strerror}; check the path and its permissions"
        raise _WrongRunError(printable_line(reason)) from error


def _drop_stdout() -> None:
    """Redirect stdout, whose reader has closed it, to the null device; otherwise Python's flush at exit would fail."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def _open_source(run: str, storage_option: tuple[str, ...]) -> Iterator[_Source]:
    """Yield the folder of a run itself or, for a URL, that of a copy of its logs."""
    if not is_url(run):
        yield _Source(Path(run), run, lambda: None)
        return
    # TensorStore takes a moment to load.
    from engine.records.stored.following import followed_copy

    with followed_copy(run, parse_pairs(storage_option)) as (folder, refresh):
        yield _Source(folder, run, refresh)


def _await_run(source: _Source, once: bool, timeout_s: float) -> None:
    """Wait until RUN contains a loss log or, unless `once` is true, the recorded settings of a run.

    Raises:
        RunNotFoundError: if RUN is not a run folder, or the run does not start to train in time.
    """
    run, name = source.folder, source.name
    if run.exists() and not run.is_dir():
        raise RunNotFoundError(f"RUN must be a run folder, but {name} is a file; give the folder that contains it")
    from engine.records.folder_lock import is_locked

    wait_s = 0.0 if once else min(_START_WAIT_S, timeout_s)
    started_s = time.monotonic()
    printed = ""
    while True:
        source.refresh()
        if _has_started(run, once):
            return
        if below := _runs_in(run):
            count = f"{len(below)} run folder{'s' * (len(below) > 1)}"
            raise RunNotFoundError(
                f"RUN must be a run folder, but {name} contains {count}; give one, such as the newest, {below[-1]}"
            )
        # A run locks its folder before it compiles, which may take minutes.
        is_held = is_locked(run)
        if time.monotonic() - started_s >= (timeout_s if is_held and not once else wait_s):
            if is_held:
                raise RunNotFoundError(
                    f"RUN must have started to train, but {name} is still compiling; try again later"
                )
            found = "contains no loss.jsonl" if run.is_dir() else "does not exist"
            raise RunNotFoundError(f"RUN must be a run folder, but {name} {found}; give the --run-dir of run-train")
        message = (
            f"{printable_line(name)} is starting or compiling; waiting up to {timeout_s:g} s"
            if is_held
            else f"waiting up to {wait_s:g} s for {printable_line(name)} to start"
        )
        if message != printed:
            click.echo(message, err=True)
            printed = message
        time.sleep(_POLL_START_S)


def _has_started(run: Path, has_log: bool = False) -> bool:
    from engine.records.loss_log import CONFIG_NAME, LOSS_LOG_NAME

    return (run / LOSS_LOG_NAME).exists() or (not has_log and (run / CONFIG_NAME).exists())


def _runs_in(folder: Path) -> list[Path]:
    """Return the run folders directly below a folder, ordered by the time they started."""
    from engine.records.loss_log import CONFIG_NAME

    # A run writes its settings once, when it starts.
    started = [(path.stat().st_mtime_ns, path.parent) for path in folder.glob(f"*/{CONFIG_NAME}")]
    return [path for _, path in sorted(started)]


def _ticks(source: _Source, once: bool, interval_s: float, timeout_s: float) -> "Iterator[Tick]":
    """Read the run folder repeatedly and yield each result, until the run has ended and all its rows have been read."""
    from engine.records.evaluation_log import EvaluationLog
    from engine.records.folder_lock import was_killed
    from engine.records.loss_log import EVALUATION_LOG_NAME, LOSS_LOG_NAME, LossLog, read_run_end, read_run_facts

    run, name = source.folder, source.name
    log, evaluation_log = LossLog(run / LOSS_LOG_NAME), EvaluationLog(run / EVALUATION_LOG_NAME)
    heard, last_step, num_evaluations = time.monotonic(), -1, 0
    while True:
        # The end is read before the rows, so that all rows written before it are seen.
        source.refresh()
        is_killed = was_killed(run)
        end, facts, more = read_run_end(run), read_run_facts(run), True
        while more:
            batch = log.read()
            more = batch.more
            # Read after the rows: an evaluation is written before the row of the next step, so it is never missed.
            evaluations = evaluation_log.read()
            if len(batch.rows) or batch.restarted or batch.num_unreadable or len(evaluations) != num_evaluations:
                heard, num_evaluations = time.monotonic(), len(evaluations)
            if len(batch.rows):
                last_step = int(batch.rows.step[-1])
            if more:
                yield Tick(batch, facts, None, evaluations, caught_up=False)
        if end is not None and end.steps_done is not None and last_step > end.steps_done:
            end = None  # left over from before the run was resumed
        yield Tick(batch, facts, end, evaluations, caught_up=True)
        if end is not None or (once and not is_killed):
            return
        reached = f"after step {last_step}" if last_step >= 0 else "before its first step"
        if is_killed:
            raise RunKilledError(
                f"the process of {name} died {reached} without a result: resume the run with run-train --resume"
            )
        if time.monotonic() - heard >= timeout_s:
            raise RunSilentError(
                f"{name} has written nothing for {timeout_s:g} s (--timeout-s) {reached}: "
                "check whether it is still running, or raise --timeout-s"
            )
        time.sleep(interval_s)


def _print_lines(ticks: "Iterator[Tick]", last: int | None, once: bool) -> None:
    """Print one line per step or evaluation to stdout, in order of step, and all other messages to stderr."""
    held: LossRows | None = None  # with `last`, the newest rows during the first pass over the log
    is_printing = last is None
    waiting: deque[EvaluationRecord] = deque()  # read already, although the step that they follow is not
    num_evaluations, newest = 0, -1
    for tick in ticks:
        rows, batch = tick.batch.rows, tick.batch
        if batch.restarted:
            click.echo("loss.jsonl was replaced; reading it from the start", err=True)
        if batch.restarted or len(tick.evaluations) < num_evaluations:
            waiting.clear()
            num_evaluations = 0
        waiting.extend(tick.evaluations[num_evaluations:])
        num_evaluations = len(tick.evaluations)
        if batch.num_unreadable:
            where = f"loss.jsonl, the last of them line {batch.last_unreadable_line}"
            click.echo(f"skipped {batch.num_unreadable} unreadable line(s) of {where}", err=True)
        if not is_printing and last is not None:
            held = rows = rows.tail(last) if held is None else held.followed_by(rows).tail(last)
            is_printing = tick.caught_up
            while is_printing and len(rows) and waiting and waiting[0].step < rows.step[0]:
                waiting.popleft()
        if is_printing:
            newest = int(rows.step[-1]) if len(rows) else newest
            is_last = tick.caught_up and (once or tick.end is not None)
            lines = plain_lines(rows, tick.facts.steps, waiting, math.inf if is_last else newest)
            click.echo("".join(f"{line}\n" for line in lines), nl=False)
        if tick.end is not None:
            click.echo(end_text(tick.end), err=True)


def plain_lines(
    rows: "LossRows", steps: int | None, waiting: "deque[EvaluationRecord]", up_to_step: float
) -> Iterator[str]:
    """Yield the lines that `run-train` prints for these rows and evaluations, in order of step, without newlines.

    Args:
        rows: the next rows.
        steps: the number of steps of the whole run, None if unknown.
        waiting: evaluations in order of step; those that are yielded are removed.
        up_to_step: yield evaluations up to this step; later ones stay in `waiting`.
    """
    from engine.stream.sinks import evaluation_words, loss_fields

    for record in records_of(rows):
        while waiting and waiting[0].step < record.step:
            yield evaluation_words(waiting.popleft())
        yield "  ".join(loss_fields(record, steps))
    while waiting and waiting[0].step <= up_to_step:
        yield evaluation_words(waiting.popleft())


def _draw_frames(console: "Console", ticks: "Iterator[Tick]", picture: Picture, once: bool, interval_s: float) -> None:
    """Redraw the chart on the alternate screen at each tick; at the end, print the last frame on the normal screen."""
    from rich.live import Live

    # `--once` prints its only frame below, without flashing the alternate screen.
    screen = contextlib.nullcontext() if once else Live(console=console, screen=True, auto_refresh=False)
    drawn_s = -math.inf
    # An interrupted frame would leave the terminal on its alternate screen without a cursor.
    with signals_held() as signals:
        try:
            with screen as live:
                for tick in signals.let_in(ticks):
                    picture.update(tick)
                    if live is not None and (tick.caught_up or time.monotonic() - drawn_s >= interval_s):
                        live.update(frame_text(picture, console, console.height), refresh=True)
                        drawn_s = time.monotonic()
        finally:
            # Leave one line for the shell's prompt.
            console.print(frame_text(picture, console, max(1, console.height - 1)))
