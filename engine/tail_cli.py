"""The command `tail-run`: follow the loss of a run from another terminal.

Owns: waiting, ending, and what a frame and a plain line say. Must not know: jax, or how the run is trained.
numpy and rich are imported where they are first needed, so that `--help` answers at once.
"""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from engine.binned_losses import BinnedLosses
    from engine.loss_chart import Glyphs, Span
    from engine.loss_log import LossBatch, LossRows, RunEnd, RunFacts

_START_WAIT_S = 5.0  # run-train imports jax before it makes its folder
_POLL_START_S = 0.1
_SILENT_SHOWN_S = 5.0  # a pause is worth a word after this long, or after this many steps' worth of time
_SILENT_SHOWN_STEPS = 5
_STYLES = {"axis": "default", "raw": "dim", "smoothed": "bold cyan", "broken": "bold red"}


class RunNotFoundError(ValueError):
    """RUN is not, or not yet, the folder of a run."""


class RunSilentError(ValueError):
    """Nothing new was written for longer than the limit."""


class _WrongRunError(click.ClickException):
    exit_code = 2


@dataclass(frozen=True)
class _Tick:
    """What one look at the run folder found."""

    batch: "LossBatch"
    facts: "RunFacts"
    end: "RunEnd | None"  # None while the run goes on
    caught_up: bool  # False while the log holds more that can be read at once


@dataclass
class _Picture:
    """All that a frame shows."""

    run: Path
    history: "BinnedLosses"
    facts: "RunFacts"
    log_scale: bool
    end: "RunEnd | None" = None
    num_unreadable: int = 0

    def take(self, tick: _Tick) -> None:
        if tick.batch.restarted:
            self.history.clear()
            self.num_unreadable = 0
        self.history.add(tick.batch.rows)
        self.num_unreadable += tick.batch.num_unreadable
        self.facts, self.end = tick.facts, tick.end


def _refuse_nan(_context: click.Context, parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):
        raise click.BadParameter("must be a number, got nan; leave it out for the default", param=parameter)
    return value


def _above(low: float, high: float | None = None) -> click.FloatRange:
    return click.FloatRange(min=low, min_open=True, max=high)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Show what is there and end.")
@click.option(
    "--interval", type=_above(0, 60), default=0.5, show_default=True, metavar="S", callback=_refuse_nan,
    help="Seconds between two looks at the log.",
)  # fmt: skip
@click.option(
    "--smoothing", type=click.FloatRange(0, 1, max_open=True), default=0.9, show_default=True, callback=_refuse_nan,
    help="Weight of the past in the smoothed loss; 0 turns smoothing off.",
)  # fmt: skip
@click.option("--last", type=click.IntRange(min=1), metavar="STEPS", help="Show only the last STEPS steps.")
@click.option("--log-scale", is_flag=True, help="Logarithmic loss axis.")
@click.option("--width", type=click.IntRange(min=1), metavar="COLUMNS", help="Of the chart.  [default: the terminal]")
@click.option("--height", type=click.IntRange(min=1), metavar="LINES", help="Of the chart.  [default: the terminal]")
@click.option(
    "--timeout-s", type=_above(0), default=600.0, show_default=True, metavar="S", callback=_refuse_nan,
    help="Give up when nothing new was written for S seconds; 'inf' never does.",
)  # fmt: skip
def main(
    run: Path,
    once: bool,
    interval: float,
    smoothing: float,
    last: int | None,
    log_scale: bool,
    width: int | None,
    height: int | None,
    timeout_s: float,
) -> None:
    """Follow the loss of the run in folder RUN, drawn live; piped, print one plain line a step.

    Ends by itself when the run has ended. A RUN which is just starting is waited for: 5 seconds for its folder,
    --timeout-s for its first step.

    Exit codes: 0 the run ended (or --once), 1 silent for --timeout-s, 2 RUN is no run folder, 130 Ctrl-C.
    """
    try:
        _await_run(run, once, timeout_s)
        ticks = _ticks(run, once, interval, timeout_s)
        if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            _print_lines(ticks, last)
            return
        from rich.console import Console

        from engine.binned_losses import BinnedLosses
        from engine.loss_log import RunFacts

        picture = _Picture(run, BinnedLosses(smoothing, last), RunFacts(), log_scale)
        _draw_frames(Console(width=width, height=height, highlight=False), ticks, picture, once, interval)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        _drop_stdout()
    except RunNotFoundError as error:
        raise _WrongRunError(_printable(str(error))) from error
    except RunSilentError as error:
        raise click.ClickException(_printable(str(error))) from error
    except OSError as error:
        reason = f"RUN must be readable, {error.filename or run}: {error.strerror}; check the path and its permissions"
        raise _WrongRunError(_printable(reason)) from error


def _drop_stdout() -> None:
    """Whoever read our output has left: let the interpreter's last flush go nowhere instead of failing."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _await_run(run: Path, once: bool, timeout_s: float) -> None:
    """Return when RUN holds a log, or the settings of a run whose first step is still to come."""
    if run.exists() and not run.is_dir():
        raise RunNotFoundError(f"RUN must be the folder of a run, {run} is a file; give the folder that holds it")
    wait_s = 0.0 if once else min(_START_WAIT_S, timeout_s)
    deadline = time.monotonic() + wait_s
    names = ("loss.jsonl",) if once else ("loss.jsonl", "config.json")
    told = False
    while not any((run / name).exists() for name in names):
        if time.monotonic() >= deadline:
            found = "holds no loss.jsonl" if run.is_dir() else "does not exist"
            raise RunNotFoundError(
                f"RUN must be the folder of a run, {run} {found}; give the --run-dir of a run-train that has begun"
            )
        if not told:
            click.echo(f"waiting up to {wait_s:g} s for {_printable(str(run))} to begin", err=True)
            told = True
        time.sleep(_POLL_START_S)


def _ticks(run: Path, once: bool, interval_s: float, timeout_s: float) -> "Iterator[_Tick]":
    """Look at the run folder again and again, until the run has ended and all its rows were read."""
    from engine.loss_log import LOSS_LOG_NAME, LossLog, read_run_end, read_run_facts

    log = LossLog(run / LOSS_LOG_NAME)
    heard, last_step = time.monotonic(), -1
    while True:
        # The end is looked for before the rows are read: rows written before it are then certain to be seen.
        end, facts, more = read_run_end(run), read_run_facts(run), True
        while more:
            batch = log.read()
            more = batch.more
            if len(batch.rows) or batch.restarted or batch.num_unreadable:
                heard = time.monotonic()
            if len(batch.rows):
                last_step = int(batch.rows.step[-1])
            if more:
                yield _Tick(batch, facts, None, caught_up=False)
        if end is not None and end.steps_done is not None and last_step > end.steps_done:
            end = None  # left over from before the run was resumed
        yield _Tick(batch, facts, end, caught_up=True)
        if once or end is not None:
            return
        if time.monotonic() - heard >= timeout_s:
            raise RunSilentError(
                f"a run must write something every --timeout-s {timeout_s:g} s, {run} has been silent since "
                f"{'step ' + str(last_step) if last_step >= 0 else 'before its first step'}; "
                "see whether it still runs, or raise --timeout-s"
            )
        time.sleep(interval_s)


def _print_lines(ticks: "Iterator[_Tick]", last: int | None) -> None:
    """One line a step on stdout; what is no step goes to stderr."""
    held: LossRows | None = None  # with `last`, the rows to begin with, while the log is read for the first time
    begun = last is None
    for tick in ticks:
        rows, batch = tick.batch.rows, tick.batch
        if batch.restarted:
            click.echo("loss.jsonl began anew", err=True)
        if batch.num_unreadable:
            where = f"loss.jsonl, the last one line {batch.last_unreadable_line}"
            click.echo(f"left out {batch.num_unreadable} unreadable line(s) of {where}", err=True)
        if not begun and last is not None:
            held = rows = rows.tail(last) if held is None else held.followed_by(rows).tail(last)
            begun = tick.caught_up
        if begun:
            click.echo("".join(f"{line}\n" for line in plain_lines(rows, tick.facts.steps)), nl=False)
        if tick.end is not None:
            click.echo(_end_text(tick.end), err=True)


def plain_lines(rows: "LossRows", steps: int | None) -> Iterator[str]:
    """A line of ASCII for each row, without newline; numbers that a row lacks are left out, its loss never is."""
    columns = (rows.step, rows.loss, rows.learning_rate, rows.images_per_s, rows.wait_ms)
    for step, loss, learning_rate, images_per_s, wait_ms in zip(*(c.tolist() for c in columns), strict=True):
        numbers = _rate_fields(learning_rate, images_per_s, wait_ms)
        yield "  ".join((_step_text(step, steps), f"loss {_loss_text(loss)}", *numbers))


def _step_text(step: int, steps: int | None) -> str:
    return f"step {step}" if steps is None else f"step {step}/{steps}"


def _loss_text(loss: float) -> str:
    return f"{loss:.4f}" if loss == 0 or 1e-3 <= abs(loss) < 1e5 else f"{loss:.4g}"


def _rate_fields(learning_rate: float, images_per_s: float, wait_ms: float) -> list[str]:
    fields = []
    if not math.isnan(learning_rate):
        fields.append(f"lr {learning_rate:.4g}")
    if not math.isnan(images_per_s):
        fields.append(f"{images_per_s:.0f} images/s" if images_per_s >= 100 else f"{images_per_s:.3g} images/s")
    if not math.isnan(wait_ms):
        fields.append(f"wait {wait_ms:.1f} ms")
    return fields


def duration_text(seconds: float) -> str:
    """Two units at most: '45 s', '3 min 20 s', '2 h 05 min', '4 d 03 h'; negative durations count as 0."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def _end_text(end: "RunEnd") -> str:
    steps = "" if end.steps_done is None else f" after {end.steps_done} steps"
    reason = "" if end.stopped_by is None else f", stopped by {end.stopped_by}"
    error = "" if end.error is None else f": {end.error}"
    return _printable(f"run ended{steps}{reason}{error}")


def _printable(text: str) -> str:
    """Paths and settings may hold control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


def status_fields(picture: _Picture, now_s: float) -> list[str]:
    """What stands under the chart; `now_s` is unix seconds."""
    history, facts = picture.history, picture.facts
    fields = []
    newest = history.newest
    if len(newest):
        step, time_s = int(newest.step[-1]), float(newest.time_s[-1])
        fields += [_step_text(step, facts.steps), f"loss {_loss_text(float(newest.loss[-1]))}"]
        fields.append(f"smoothed {_loss_text(history.smoothed)}")
        fields += _rate_fields(
            float(newest.learning_rate[-1]), float(newest.images_per_s[-1]), float(newest.wait_ms[-1])
        )
        if picture.end is None:
            fields += _clock_fields(step, facts.steps, history.seconds_per_step, now_s - time_s)
    elif picture.end is None:
        fields.append("waiting for the first step")
    if picture.end is not None:
        fields.append(_end_text(picture.end))
    if picture.num_unreadable:
        fields.append(f"{picture.num_unreadable} unreadable line(s)")
    return fields


def _clock_fields(step: int, steps: int | None, seconds_per_step: float, silent_s: float) -> list[str]:
    """How long the run has been silent, where that is worth a word; else how long it has still to go."""
    pace = 0.0 if math.isnan(seconds_per_step) else seconds_per_step
    if silent_s > max(_SILENT_SHOWN_S, _SILENT_SHOWN_STEPS * pace):
        return [f"last step {duration_text(silent_s)} ago"]
    if steps is None or not pace or step >= steps:
        return []
    return [f"left {duration_text((steps - step) * pace)}"]


def pack_fields(fields: list[str], width: int) -> list[str]:
    """Fields joined by two blanks into lines of at most `width` characters; a longer field is cut."""
    lines: list[str] = []
    for text in fields:
        if lines and len(lines[-1]) + 2 + len(text) <= width:
            lines[-1] += f"  {text}"
        else:
            lines.append(text[:width])
    return lines


def frame_lines(picture: _Picture, width: int, height: int, glyphs: "Glyphs", now_s: float) -> "list[list[Span]]":
    """Title, chart and status: at most `height` lines of at most `width` characters (both at least 1)."""
    from engine.loss_chart import Span, draw_chart

    facts = picture.facts
    title = [
        text
        for text in (facts.model, f"batch {facts.batch}" if facts.batch else None, picture.run.absolute().name)
        if text
    ]
    above = [_printable(line) for line in pack_fields(title, width)]
    below = pack_fields(status_fields(picture, now_s), width)
    # The numbers go last: where lines are few, first the title gives way, then the chart.
    below = below[:height]
    if len(above) + len(below) >= height:
        above = []
    chart_height = height - len(above) - len(below)
    curve = picture.history.curve()
    chart = draw_chart(curve, width, chart_height, log_scale=picture.log_scale, glyphs=glyphs) if chart_height else []
    return [*([Span(line, "axis")] for line in above), *chart, *([Span(line, "axis")] for line in below)]


def _frame_text(picture: _Picture, console: "Console", height: int) -> "Text":
    from rich.text import Text

    from engine.loss_chart import ASCII_GLYPHS, UNICODE_GLYPHS

    encoding = console.encoding
    glyphs = UNICODE_GLYPHS if _encodes(encoding, "│┤└─┬×⣿") else ASCII_GLYPHS
    lines = frame_lines(picture, console.width, height, glyphs, time.time())
    frame = Text("\n").join(
        Text.assemble(*((s.text.encode(encoding, "replace").decode(encoding), _STYLES[s.ink]) for s in line))
        for line in lines
    )
    # A title in wide characters may still be too long for its line: cut it, for a wrapped line would push the rest.
    frame.no_wrap, frame.overflow = True, "crop"
    return frame


def _encodes(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _draw_frames(
    console: "Console", ticks: "Iterator[_Tick]", picture: _Picture, once: bool, interval_s: float
) -> None:
    """Redraw on the alternate screen until the ticks end; the last frame then stays on the ordinary screen."""
    from rich.live import Live

    # `--once` prints its only frame below: no second screen to flash up.
    screen = contextlib.nullcontext() if once else Live(console=console, screen=True, auto_refresh=False)
    drawn_s = -math.inf
    terminated = signal.signal(signal.SIGTERM, _leave)
    try:
        with screen as live:
            for tick in ticks:
                picture.take(tick)
                if live is not None and (tick.caught_up or time.monotonic() - drawn_s >= interval_s):
                    live.update(_frame_text(picture, console, console.height), refresh=True)
                    drawn_s = time.monotonic()
    finally:
        signal.signal(signal.SIGTERM, terminated)
        # One line is left for the shell's prompt.
        console.print(_frame_text(picture, console, max(1, console.height - 1)))


def _leave(signal_number: int, _frame: object) -> None:
    """End by way of the `finally` blocks: a terminal left on its alternate screen is no use to anybody."""
    raise SystemExit(128 + signal_number)
