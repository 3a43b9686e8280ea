"""The frames of `tail-run` with several runs: their curves over the same axes, and a legend with a line for each run.

Must not know: terminals, waiting, or how the runs are trained. numpy and rich are imported where they are first needed,
so that `--help` answers at once.
"""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loopfeed.engine.commands.run_names import shorten_names
from loopfeed.engine.commands.tail_frame import Picture, clock_fields, glyphs_for, text_of
from loopfeed.preprocess.quantities import quantity

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from loopfeed.engine.commands.loss_chart import Glyphs, Span

_LEAST_CHART_HEIGHT = 8
# Columns are left out before names are shorter than twice the first; the second is all that a narrow terminal leaves.
_LEAST_NAME_WIDTH, _SHORTEST_NAME_WIDTH = 12, 4


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


def overlay_lines(
    runs: Sequence[Picture], width: int, height: int, glyphs: "Glyphs", now_s: float
) -> "list[list[Span]]":
    """Return a frame of title, chart and legend, at most `height` lines long and `width` characters wide."""
    from loopfeed.engine.commands.loss_chart import AXIS, Span, draw_chart, style_of

    title = [Span(f"smoothed loss of {quantity(len(runs), 'run')}"[:width], AXIS)]
    legend = [[Span(line[:1], style_of(index)), Span(line[1:], AXIS)] for index, line in
              enumerate(legend_lines(runs, width, now_s))]  # fmt: skip
    # Many runs must leave room for the chart.
    most = max(height - _LEAST_CHART_HEIGHT - 1, height // 2, 1)
    if len(legend) > most:
        legend = [*legend[: most - 1], [Span(f"and {len(legend) - most + 1} more"[:width], AXIS)]]
    chart_height = height - len(legend)
    if chart_height <= _LEAST_CHART_HEIGHT:
        title = []
    chart_height -= bool(title)
    curves = [run.history.curve() for run in runs]
    log_scale = runs[0].log_scale
    chart = draw_chart(curves, width, chart_height, log_scale=log_scale, glyphs=glyphs) if chart_height else []
    return [*([title] if title else []), *chart, *legend]


def overlay_text(runs: Sequence[Picture], console: "Console", height: int) -> "Text":
    """Return a coloured frame of at most `height` lines, in characters that the console's encoding supports."""
    return text_of(overlay_lines(runs, console.width, height, glyphs_for(console), time.time()), console)
