"""The text that `tail-run` shows: frames with a chart and numbers, and a line about the end of the run.

Must not know: terminals, waiting, or how the run is trained. numpy and rich are imported where they are first needed,
so that `--help` answers at once.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loopfeed.preprocess.printable import printable_line
from loopfeed.preprocess.quantities import quantity

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from loopfeed.engine.commands.binned_losses import BinnedLosses
    from loopfeed.engine.commands.loss_chart import Glyphs, Span
    from loopfeed.engine.records.loss_log import LossBatch, LossRows, RunEnd, RunFacts
    from loopfeed.engine.stream.sinks import EvaluationRecord, LossRecord

_SILENT_SHOWN_S = 5.0  # a pause is shown after this time, or after the time of this many steps
_SILENT_SHOWN_STEPS = 5


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


def duration_text(seconds: float) -> str:
    """Format a duration in at most two units: '45 s', '3 min 20 s', '2 h 05 min', '4 d 03 h'; '0 s' if negative."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def end_text(end: "RunEnd") -> str:
    """Return a printable line that says after how many steps and why a run ended."""
    steps = "" if end.steps_done is None else f" after {quantity(end.steps_done, 'step')}"
    reasons = {
        "steps": ": all steps done",
        "top1": ": top-1 accuracy reached",
        "error": " with an error",
        "KeyboardInterrupt": ", stopped at once by Ctrl-C",
        "callback": ", stopped by a callback",
        None: "",
    }
    reason = reasons.get(end.stopped_by, f", stopped by {end.stopped_by}")
    error = "" if end.error is None else f": {end.error}"
    return printable_line(f"run ended{steps}{reason}{error}")


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
        fields.append(end_text(picture.end))
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


def frame_lines(picture: Picture, width: int, height: int, glyphs: "Glyphs", now_s: float) -> "list[list[Span]]":
    """Return a frame of title, chart and status, at most `height` lines long and `width` characters wide."""
    from loopfeed.engine.commands.loss_chart import AXIS, Span, draw_chart

    facts = picture.facts
    title = [text for text in (facts.model, f"batch {facts.batch}" if facts.batch else None, picture.name) if text]
    above = [printable_line(line) for line in pack_fields(title, width)]
    below = pack_fields(status_fields(picture, now_s), width)
    # If there is not enough height, leave out the title first, then the chart, and last the numbers.
    below = below[:height]
    if len(above) + len(below) >= height:
        above = []
    chart_height = height - len(above) - len(below)
    curves, log_scale = [picture.history.curve()], picture.log_scale
    chart = draw_chart(curves, width, chart_height, log_scale=log_scale, glyphs=glyphs) if chart_height else []
    return [*([Span(line, AXIS)] for line in above), *chart, *([Span(line, AXIS)] for line in below)]


def frame_text(picture: Picture, console: "Console", height: int) -> "Text":
    """Return a coloured frame of at most `height` lines, in characters that the console's encoding supports."""
    return text_of(frame_lines(picture, console.width, height, glyphs_for(console), time.time()), console)


def glyphs_for(console: "Console") -> "Glyphs":
    """Return the character set that the console's encoding supports."""
    from loopfeed.engine.commands.loss_chart import ASCII_GLYPHS, UNICODE_GLYPHS

    return UNICODE_GLYPHS if _encodes(console.encoding, "│┤└─┬×⣿") else ASCII_GLYPHS


def text_of(lines: "list[list[Span]]", console: "Console") -> "Text":
    """Return the lines of a frame in colours, without the characters that the console's encoding lacks."""
    from rich.text import Text

    encoding = console.encoding
    frame = Text("\n").join(
        Text.assemble(*((text.encode(encoding, "replace").decode(encoding), style) for text, style in line))
        for line in lines
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
