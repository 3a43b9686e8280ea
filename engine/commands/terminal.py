"""The display of the losses on a terminal: one progress line that is redrawn in place."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from loopfeed.engine.records.evaluation_log import best_until, best_words, better_of
from loopfeed.engine.stream.sinks import (
    SHOWN_MEAN_STEPS,
    EvaluationProgress,
    EvaluationRecord,
    LossRecord,
    RunDescription,
    epoch_field,
    evaluation_words,
)
from loopfeed.preprocess.quantities import quantity

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_NUM_BARS = 16
_FEWEST_BARS = 4
# The bar of the steps is shorter on a terminal of less than so many columns.
_BAR_WIDTH, _SHORT_BAR_WIDTH, _WIDE = 10, 5, 100
# Width of the time left ("0:00:00" or longer), and the number of gaps between four columns.
_TIME_WIDTH = 8
_GAPS = 3
_REDRAWN_PER_S = 5
_MOST_MEANS = 512  # an even number, because they are merged in pairs


class ProgressSink:
    """A sink that shows a progress line: step, loss, epoch, best evaluation, speed, learning rate, wait and time left.

    Args:
        console: where to draw.
        steps: the number of steps of the whole run.
        image_at: returns how many images come before a step.
    """

    is_display = True

    def __init__(self, console: "Console", *, steps: int, image_at: Callable[[int], int]) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
        from rich.table import Column

        sink = self
        bar_width = _BAR_WIDTH if console.width >= _WIDE else _SHORT_BAR_WIDTH
        taken = 2 * len(str(steps)) + 1 + bar_width + _TIME_WIDTH + _GAPS

        class StreamColumn(ProgressColumn):
            """The column with loss and speeds; it is computed only at redraws, which can be 1,000 steps apart."""

            def render(self, task: Task) -> "Text":  # noqa: ARG002 - the sink knows more than the task
                return sink.summary(console.width - taken)

        self._image_at, self._steps, self._is_complete = image_at, steps, False
        self._epoch_at: Callable[[int], float] | None = None
        self._best: EvaluationRecord | None = None
        self._compared: str | None = None
        self._evaluation: EvaluationProgress | None = None
        self._recent: deque[LossRecord] = deque(maxlen=SHOWN_MEAN_STEPS)
        self._history = LossHistory()
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=bar_width),
            StreamColumn(Column(no_wrap=True, overflow="ellipsis")),
            TimeRemainingColumn(compact=True),
            console=console,
            refresh_per_second=_REDRAWN_PER_S,
        )
        self._task = self._progress.add_task("train", total=steps)

    def describe_run(self, description: RunDescription) -> None:
        """Begin with the best evaluation of the launches before, by `keep_best`, else by top-1, else by the loss."""
        self._epoch_at, self._compared = description.epoch_at, description.settings["keep_best"]
        self._progress.update(self._task, completed=description.step)
        self._is_complete = description.step >= self._steps
        if description.run_dir is not None:
            self._best = best_until(description.run_dir, description.step, self._compared)

    def open(self) -> None:
        """Start drawing the progress line."""
        self._progress.start()

    def write(self, record: LossRecord) -> None:
        """Update the progress line with the record of one step."""
        if not self._recent and record.step > 1:
            # A resumed run: do not estimate the time left from the steps of earlier launches.
            self._progress.reset(self._task, completed=record.step - 1)
        self._evaluation = None
        self._recent.append(record)
        self._history.add(record.loss)
        self._progress.update(self._task, completed=record.step)

    def write_progress(self, progress: EvaluationProgress) -> None:
        """Show the progress of an evaluation instead of the loss."""
        self._evaluation = progress
        self._progress.update(self._task, completed=progress.step)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Print the result of an evaluation above the progress line."""
        self._evaluation = None
        self._best = better_of(self._best, record, self._compared)
        console = self._progress.console
        console.print(evaluation_words(record, console.width), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Draw the progress line for the last time and leave it on the screen."""
        self._evaluation = None
        self._progress.refresh()
        self._progress.stop()

    def summary(self, width: int = 10**6) -> "Text":
        """Return the line's text: in training, loss, history, epoch, best and speeds; in an evaluation, its progress.

        Args:
            width: available columns; if too few, the history is shortened and left out first, the epoch last.
        """
        from rich.text import Text

        evaluation = self._evaluation
        if evaluation is not None:
            return Text(f"evaluating: {evaluation.batch:,} of {quantity(evaluation.num_batches, 'batch')}")
        recent = tuple(self._recent)
        if not recent:
            return Text("all steps are done" if self._is_complete else "waiting for the first step", style="dim")
        elapsed_s = recent[-1].time - recent[0].time
        images = self._image_at(recent[-1].step) - self._image_at(recent[0].step)
        images_per_s = images / elapsed_s if elapsed_s > 0 else recent[-1].images_per_s
        loss = math.fsum(record.loss for record in recent) / len(recent)
        wait_ms = math.fsum(record.wait_ms for record in recent) / len(recent)
        number = f"{loss:z.4f}"
        left = width - len("loss ") - len(number)
        speeds = f"  {images_per_s:,.0f} img/s", f"  wait {wait_ms:.1f} ms", f"  lr {recent[-1].lr:z.3g}"
        facts: list[str] = []
        at = recent[-1].step
        epoch = f"  {epoch_field(self._epoch_at, at, self._steps)}" if self._epoch_at is not None else ""
        best = "" if self._best is None else f"  {best_words(self._best, self._compared, is_brief=True)}"
        for fact in filter(None, (epoch, best, *speeds)):
            left -= len(fact)
            if left < 0:
                left += len(fact)
                break
            facts.append(fact)
        num_bars = min(_NUM_BARS, left - 1)
        history = f" {sparkline(self._history.means, num_bars)}" if num_bars >= _FEWEST_BARS else ""
        return Text.assemble("loss ", (number, "bold"), history, *facts)


class LossHistory:
    """The loss history in bounded memory: means over equally long intervals, which are merged in pairs as needed.

    Attributes:
        means: fewer than 512 means, oldest first, without the last, incomplete interval.
    """

    def __init__(self) -> None:
        self._interval, self._pending, self._sum = 1, 0, 0.0
        self.means: list[float] = []

    def add(self, loss: float) -> None:
        """Add the next loss."""
        self._sum += loss
        self._pending += 1
        if self._pending < self._interval:
            return
        self.means.append(self._sum / self._interval)
        self._sum, self._pending = 0.0, 0
        if len(self.means) >= _MOST_MEANS:
            pairs = zip(self.means[::2], self.means[1::2], strict=True)
            self.means = [(first + second) / 2 for first, second in pairs]
            self._interval *= 2


def sparkline(values: Sequence[float], width: int) -> str:
    """Divide the values into `width` equal parts; draw the mean of each as a block character (blank if not finite)."""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)] if width else [0]
    means = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return " " * width
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    last = len(_BARS) - 1
    return "".join(_BARS[round((mean - low) / span * last)] if math.isfinite(mean) else " " for mean in means)
