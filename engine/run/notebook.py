"""The display of a run in a notebook: one output that is updated in place, with the progress and the curves so far.

It needs no widgets: the messages `display_data` and `update_display_data` are those of every Jupyter front end, and of
nbconvert, which keeps only the last state. Elsewhere there is no display.
"""

import math
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from typing import Any

import numpy as np

from loopfeed.engine.charts.card import html_card, text_card
from loopfeed.engine.charts.figure import Figure
from loopfeed.engine.charts.loss_charts import charts_of
from loopfeed.engine.python_calls import in_python_words
from loopfeed.engine.records.binned_log import BinnedLog
from loopfeed.engine.records.evaluation_log import describe_evaluations
from loopfeed.engine.run.result import TrainResult
from loopfeed.engine.stream.sinks import (
    SHOWN_MEAN_STEPS,
    EvaluationProgress,
    EvaluationRecord,
    LossRecord,
    RunDescription,
    epoch_field,
)
from loopfeed.preprocess.printable import printable_line
from loopfeed.preprocess.quantities import duration_text, quantity
from loopfeed.preprocess.system_errors import error_text

# Drawing takes some milliseconds, and what is sent some kilobytes, each time.
_DRAWN_EVERY_S = 0.5
_NUM_BINS = 256
# How long one thread waits for another that draws; what it has to show is then shown later, if at all.
_DRAWN_WITHIN_S = 1.0
# The last state stays in the notebook, so it waits for a thread that a busy machine holds up in drawing.
_ENDED_WITHIN_S = 20.0
_MOST_NOTICES = 50
_CHART_HEIGHT = 120

type Publish = Callable[[dict[str, str], bool], None]
"""Shows texts by their media types, the first time with False, then with True in place of what is shown."""


def notebook_shell() -> Any:
    """Return IPython's shell if this process is the kernel of a notebook, else None."""
    # IPython is asked only if it runs this session.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell if hasattr(shell, "kernel") else None


def publisher_of_notebook() -> Publish | None:
    """Return what shows something in the running cell of a notebook, and updates it later; None without a notebook."""
    shell = notebook_shell()
    if shell is None:
        return None
    transient = {"display_id": f"loopfeed-{uuid.uuid4().hex}"}

    def publish(content: dict[str, str], is_update: bool) -> None:
        shell.display_pub.publish(content, metadata={}, transient=transient, update=is_update)

    return publish


class NotebookDisplay:
    """A sink that shows a run in a notebook: a bar, the newest numbers, the loss and the accuracies so far.

    Args:
        publish: shows it.
        at_once: whether to show it now, in the cell that runs now, not once there is something to show.
    """

    is_display = True

    def __init__(self, publish: Publish, *, at_once: bool = False) -> None:
        self._publish, self._drawn_s, self._is_shown = publish, -math.inf, False
        self._title, self._step, self._steps, self._first_step = "starting", 0, 0, 0
        self._epoch_at: Callable[[int], float] | None = None
        self._keep_best: str | None = None
        self._guard = threading.Lock()  # messages come from other threads than records
        self._bins, self._added = BinnedLog(_NUM_BINS), deque[LossRecord]()
        self._recent: deque[LossRecord] = deque(maxlen=SHOWN_MEAN_STEPS)
        self._evaluations: list[EvaluationRecord] = []
        self._notices: deque[str] = deque(maxlen=_MOST_NOTICES)
        self._evaluating: EvaluationProgress | None = None
        if at_once:
            self._draw()

    def say(self, notice: str) -> None:
        """Show a message of the run; called from any thread."""
        self._notices.append(notice)
        self._draw_in_time()

    def describe_run(self, description: RunDescription) -> None:
        """Take the number of steps of the run, what counts its epochs, and which evaluation is best."""
        self._steps, self._step = int(description.settings["steps"] or 0), description.step
        self._epoch_at, self._keep_best = description.epoch_at, description.settings.get("keep_best")
        self._title = "compiling the program"
        self._draw()

    def open(self) -> None:
        """Show that the run begins."""
        self._title = "waiting for the first step"
        self._draw()

    def write(self, record: LossRecord) -> None:
        """Take the loss of a step."""
        self._title, self._step, self._evaluating = "training", record.step, None
        self._recent.append(record)
        self._added.append(record)
        self._draw_in_time()

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Take an evaluation."""
        self._evaluations = [*self._evaluations, replace(record, metrics={})]
        self._evaluating = None
        self._draw_in_time()

    def write_progress(self, progress: EvaluationProgress) -> None:
        """Take the progress of an evaluation."""
        self._evaluating = progress
        self._draw_in_time()

    def close(self) -> None:
        """Show the last step; `end` says how the run ended."""
        self._draw()

    def end(self, ended: TrainResult | BaseException) -> None:
        """Show how the run ended, unless it was refused before there was anything to show; called after `close`."""
        if not self._is_shown:
            return
        if isinstance(ended, TrainResult):
            self._title = str(ended).partition("\n")[0]
        else:
            self._title = f"run ended by {type(ended).__name__}"
            # The traceback is below, except of a run in the background.
            if threading.current_thread() is not threading.main_thread() and isinstance(ended, Exception):
                self._title += f": {in_python_words(error_text(ended))}"
        self._recent.clear()
        self._evaluating = None
        self._draw(_ENDED_WITHIN_S)

    def _draw_in_time(self) -> None:
        if time.monotonic() - self._drawn_s >= _DRAWN_EVERY_S:
            self._draw(0.0)

    def _add(self) -> None:
        """Add the newest steps to the curve."""
        if added := [self._added.popleft() for _ in range(len(self._added))]:
            columns = {name: np.array([getattr(each, name) for each in added], np.float64) for name in ("step", "loss")}
            self._bins.add(columns)

    def _draw(self, limit_s: float = _DRAWN_WITHIN_S) -> None:
        if not self._guard.acquire(timeout=limit_s):
            return
        try:
            self._show()
        finally:
            self._guard.release()

    def _show(self) -> None:
        self._drawn_s = time.monotonic()
        self._add()
        title, facts = self._title, self._facts()
        charts = charts_of(self._bins, self._evaluations)
        figure = Figure(charts).to_svg(_CHART_HEIGHT) if charts else ""
        html = html_card(title, facts, _bar(self._step, self._steps), figure, _messages([*self._notices]))
        self._publish({"text/html": html, "text/plain": text_card(title, facts)}, self._is_shown)
        self._is_shown = True

    def _facts(self) -> list[tuple[str, str]]:
        facts = []
        if self._steps:
            epoch = "" if self._epoch_at is None else f", {epoch_field(self._epoch_at, self._step, self._steps)}"
            facts.append(("step", f"{self._step:,} of {self._steps:,}{epoch}{self._left()}"))
        if recent := [*self._recent]:
            loss = math.fsum(each.loss for each in recent) / len(recent)
            wait_ms = math.fsum(each.wait_ms for each in recent) / len(recent)
            facts.append(("loss", f"{loss:z.4f}, learning rate {recent[-1].lr:z.3g}"))
            facts.append(("speed", f"{recent[-1].images_per_s:,.0f} images/s, waiting {wait_ms:.1f} ms a step"))
        if (evaluating := self._evaluating) is not None:
            batches = quantity(evaluating.num_batches, "batch")
            facts.append(("evaluating", f"{evaluating.batch:,} of {batches}"))
        if self._evaluations:
            facts.append(("evaluation", describe_evaluations(self._evaluations, self._keep_best)))
        return facts

    def _left(self) -> str:
        """Return how long the rest takes at the speed of the newest steps."""
        recent = [*self._recent]
        elapsed_s = recent[-1].time - recent[0].time if recent else 0.0
        if elapsed_s <= 0 or self._step >= self._steps:
            return ""
        left_s = elapsed_s * (self._steps - self._step) / (recent[-1].step - recent[0].step)
        return f", {duration_text(left_s)} left"


def _bar(step: int, steps: int) -> str:
    share = 100 * min(step / steps, 1.0) if steps else 0.0
    return (
        '<div style="height:6px;max-width:40em;margin:.4em 0;border-radius:3px;background:rgba(128,128,128,.25)">'
        f'<div style="height:6px;border-radius:3px;background:#1f7ad1;width:{share:.1f}%"></div></div>'
    )


def _messages(notices: Sequence[str]) -> str:
    """Return the warnings, and the other messages folded."""
    lines = [escape(printable_line(line)) for line in notices]
    warnings = "".join(f"<div>{line}</div>" for line in lines if line.startswith("warning"))
    others = "<br>".join(line for line in lines if not line.startswith("warning"))
    return warnings + (f"<details><summary>messages</summary>{others}</details>" if others else "")


@contextmanager
def ending_display(display: NotebookDisplay | None) -> Iterator[Callable[[TrainResult], TrainResult]]:
    """Yield a function that notes the result of the block; after the block, its end is shown, whatever it is."""
    ended: list[TrainResult | BaseException] = []

    def end(result: TrainResult) -> TrainResult:
        ended.append(result)
        return result

    try:
        yield end
    except BaseException as error:
        ended[:] = [error]
        raise
    finally:
        if display is not None and ended:
            display.end(ended[0])


def notebook_display(wanted: bool | None, *, at_once: bool) -> NotebookDisplay | None:
    """Return the display of a run if this is a notebook and it is not switched off, else None."""
    publish: Any = None if wanted is False else publisher_of_notebook()
    return None if publish is None else NotebookDisplay(publish, at_once=at_once)
