"""The text that `tail-run` shows: frames with a chart and numbers of one run or several, and a line about an end.

Must not know: terminals, waiting, or how the run is trained. numpy and rich are imported where they are first needed,
so that `--help` answers at once.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loopfeed.engine.commands.run_names import shorten_names
from loopfeed.preprocess.printable import printable_line
from loopfeed.preprocess.quantities import duration_text, quantity

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from loopfeed.engine.commands.binned_losses import BinnedLosses
    from loopfeed.engine.commands.loss_chart import Glyphs, Span
    from loopfeed.engine.records.loss_log import LossBatch, LossRows, RunEnd, RunFacts
    from loopfeed.engine.stream.sinks import EvaluationRecord, LossRecord

_SILENT_SHOWN_S = 5.0  # a pause is shown after this time, or after the time of this many steps
_SILENT_SHOWN_STEPS = 5
_LEAST_CHART_HEIGHT = 8  # above the legend of several runs
# Columns are left out before names are shorter than twice the first; the second is all that a narrow terminal leaves.
_LEAST_NAME_WIDTH, _SHORTEST_NAME_WIDTH = 12, 4


@dataclass(frozen=True)
class Tick:
    """The result of one read of the run folder."""

    batch: "LossBatch"
    facts: "RunFacts"
    end: "RunEnd | None"  # None while the run continues
    evaluations: "tuple[EvaluationRecord, ...]"  # all so far, in file order
    caught_up: bool  # False while the log contains more rows that can be read without waiting


@dataclass
class Picture:
    """A run in a frame: its losses and other information about it."""

    name: str
    history: "BinnedLosses"
    facts: "RunFacts"
    log_scale: bool
    end: "RunEnd | None" = None
    evaluation: "EvaluationRecord | None" = None  # the newest
    num_unreadable: int = 0
    exists: bool = False
    is_killed: bool = False  # whether its process died without a result
    is_silent: bool = False  # whether it has written nothing for longer than the time limit

    def update(self, tick: Tick) -> None:
        """Update the data from one read of the run folder."""
        if tick.batch.restarted:
            self.history.clear()
            self.num_unreadable = 0
        self.history.add(tick.batch.rows)
        self.num_unreadable += tick.batch.num_unreadable
        self.facts, self.end = tick.facts, tick.end
        self.evaluation = tick.evaluations[-1] if tick.evaluations else None


def records_of(rows: "LossRows") -> "Iterator[LossRecord]":
    """Yield each row as a loss record; missing numbers are NaN."""
    from loopfeed.engine.stream.sinks import LossRecord

    columns = (rows.step, rows.loss, rows.learning_rate, rows.images_per_s, rows.wait_ms, rows.time_s, rows.metrics)
    for row in zip(*(column.tolist() for column in columns), strict=True):
        yield LossRecord(*row)


def status_fields(picture: Picture, now_s: float) -> list[str]:
    """Return the text fields to show below the chart; `now_s` is the current time in seconds since the Unix epoch."""
    from loopfeed.engine.stream.sinks import loss_fields, loss_number, metric_fields

    history, facts = picture.history, picture.facts
    fields = []
    if len(history.newest):
        (newest,) = records_of(history.newest)
        step, loss, *rates = loss_fields(newest, facts.steps)
        fields += [step, loss, f"smoothed {loss_number(history.smoothed)}", *rates]
    elif picture.end is None:
        fields.append("waiting for the first step")
    if (evaluation := picture.evaluation) is not None:
        result = f"loss {loss_number(evaluation.loss)}"
        if not math.isnan(evaluation.top1):
            result = f"top-1 {100 * evaluation.top1:.2f} %"
        fields.append("  ".join([f"{result} at step {evaluation.step}", *metric_fields(evaluation.metrics)]))
    if len(history.newest) and picture.end is None:
        fields += clock_fields(newest.step, facts.steps, history.seconds_per_step, now_s - newest.time)
    if picture.end is not None:
        fields.append(picture.end.line())
    if picture.num_unreadable:
        fields.append(quantity(picture.num_unreadable, "unreadable line"))
    return fields


def clock_fields(step: int, steps: int | None, seconds_per_step: float, silent_s: float) -> list[str]:
    """Return at most one field: the time since the last step if that is long, else the estimated time left, if any."""
    pace = 0.0 if math.isnan(seconds_per_step) else seconds_per_step
    if silent_s > max(_SILENT_SHOWN_S, _SILENT_SHOWN_STEPS * pace):
        return [f"last step {duration_text(silent_s)} ago"]
    if steps is None or not pace or step >= steps:
        return []
    return [f"left {duration_text((steps - step) * pace)}"]


def pack_fields(fields: list[str], width: int) -> list[str]:
    """Join fields with two spaces into lines of at most `width` characters; truncate a field that is longer."""
    lines: list[str] = []
    for text in fields:
        if lines and len(lines[-1]) + 2 + len(text) <= width:
            lines[-1] += f"  {text}"
        else:
            lines.append(text[:width])
    return lines


def _state_of(run: Picture, now_s: float) -> str:
    """Return what a run does, in a word, with a time if it trains."""
    if run.end is not None:
        return run.end.outcome
    if run.is_killed:
        return "killed"
    if run.is_silent:
        return "silent"
    newest = run.history.newest
    if not len(newest):
        return "starting" if run.exists else "not started"
    silent_s = now_s - float(newest.time_s[-1])
    clock = clock_fields(int(newest.step[-1]), run.facts.steps, run.history.seconds_per_step, silent_s)
    return "  ".join(["running", *clock])


def legend_lines(runs: Sequence[Picture], width: int, now_s: float) -> list[str]:
    """Return a line of text for each run: letter, name, step, loss, and its state; more if `width` allows it."""
    from loopfeed.engine.commands.loss_chart import LETTERS
    from loopfeed.engine.stream.sinks import loss_number

    steps, losses, accuracies, speeds = [], [], [], []
    for run in runs:
        history, total = run.history, run.facts.steps
        last, evaluation = history.last_step, run.evaluation
        steps.append("-" if last is None else f"step {last}" + ("" if total is None else f"/{total}"))
        losses.append("" if last is None else f"loss {loss_number(_loss_of(run))}")
        has_top1 = evaluation is not None and not math.isnan(evaluation.top1)
        accuracies.append(f"top-1 {100 * evaluation.top1:.2f} %" if evaluation is not None and has_top1 else "")
        speeds.append("" if math.isnan(speed := history.images_per_s) else f"{speed:,.0f} images/s")
    states = [_state_of(run, now_s) for run in runs]
    names = [run.name for run in runs]
    columns = [steps, losses, accuracies, speeds, states]

    def room(columns: list[list[str]]) -> int:
        return width - 2 - sum(2 + max(map(len, column)) for column in columns if any(column))

    longest = max(map(len, names))
    for extra in (speeds, accuracies):
        if room(columns) < min(longest, 2 * _LEAST_NAME_WIDTH):
            columns.remove(extra)
    if room(columns) < min(longest, 2 * _LEAST_NAME_WIDTH):
        columns[-1] = [state.split("  ")[0] for state in states]
    names = shorten_names(names, max(1, min(longest, max(room(columns), _SHORTEST_NAME_WIDTH))))
    shown = [column for column in [names, *columns] if any(column)]
    widths = [max(map(len, column)) for column in shown]
    return [
        "  ".join([LETTERS[index], *(text.ljust(size) for text, size in zip(row, widths, strict=True))])
        .replace("  ", " ", 1)
        .rstrip()[:width]
        for index, row in enumerate(zip(*shown, strict=True))
    ]


def _loss_of(run: Picture) -> float:
    """Return the smoothed loss, or the newest loss if that is NaN or infinite."""
    history = run.history
    newest = float(history.newest.loss[-1]) if len(history.newest) else math.nan
    return history.smoothed if math.isfinite(newest) or not len(history.newest) else newest


def frame_lines(runs: Sequence[Picture], width: int, height: int, glyphs: "Glyphs", now_s: float) -> "list[list[Span]]":
    """Return a frame of at most `height` lines of at most `width` characters: title, chart, and numbers below it.

    Of one run, the title has its model, and the numbers are its own; of several, each has a line of a legend.
    """
    from loopfeed.engine.commands.loss_chart import AXIS, Span, draw_chart, style_of

    # If there is not enough height, leave out the title first, then the chart of one run, and last the numbers.
    if len(runs) == 1:
        facts = runs[0].facts
        title = [text for text in (facts.model, f"batch {facts.batch}" if facts.batch else None, runs[0].name) if text]
        above = [printable_line(line) for line in pack_fields(title, width)]
        below = [[Span(line, AXIS)] for line in pack_fields(status_fields(runs[0], now_s), width)[:height]]
        least = 1
    else:
        above = [f"smoothed loss of {quantity(len(runs), 'run')}"[:width]]
        legend = enumerate(legend_lines(runs, width, now_s))
        below = [[Span(line[:1], style_of(number)), Span(line[1:], AXIS)] for number, line in legend]
        # Many runs must leave room for the chart.
        most = max(height - _LEAST_CHART_HEIGHT - 1, height // 2, 1)
        if len(below) > most:
            below = [*below[: most - 1], [Span(f"and {len(below) - most + 1} more"[:width], AXIS)]]
        least = _LEAST_CHART_HEIGHT
    if height - len(above) - len(below) < least:
        above = []
    chart_height = height - len(above) - len(below)
    curves, log_scale = [run.history.curve() for run in runs], runs[0].log_scale
    chart = draw_chart(curves, width, chart_height, log_scale=log_scale, glyphs=glyphs) if chart_height else []
    return [*([Span(line, AXIS)] for line in above), *chart, *below]


def frame_text(runs: Sequence[Picture], console: "Console", height: int) -> "Text":
    """Return a coloured frame of at most `height` lines, in characters that the console's encoding supports."""
    from rich.text import Text

    from loopfeed.engine.commands.loss_chart import ASCII_GLYPHS, UNICODE_GLYPHS

    encoding = console.encoding
    glyphs = UNICODE_GLYPHS if _encodes(encoding, "│┤└─┬×⣿") else ASCII_GLYPHS
    frame = Text("\n").join(
        Text.assemble(*((text.encode(encoding, "replace").decode(encoding), style) for text, style in line))
        for line in frame_lines(runs, console.width, height, glyphs, time.time())
    )
    # A title in wide characters may still be too long: crop it, since a wrapped line would shift the rest.
    frame.no_wrap, frame.overflow = True, "crop"
    return frame


def _encodes(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
