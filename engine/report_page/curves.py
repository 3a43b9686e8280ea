"""The columns of `loss.jsonl` as curves of a bounded number of points.

Owns the division of the steps into bins, and the smoothing. Must not know: HTML, charts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loopfeed.engine.records.loss_log import LOSS_LOG_NAME, Floats, LossLog, LossRows, last_logged_step
from loopfeed.engine.report_page.absent import Absent
from loopfeed.preprocess.quantities import quantity

_CHUNK_BYTES = 1 << 22
_MOST_METRICS = 8
# The smoothed curve averages over about this part of the run, and at least this many steps.
_SMOOTHED_PART, _LEAST_SMOOTHED_STEPS = 0.01, 10.0


@dataclass(frozen=True, eq=False)
class Curves:
    """The losses of a run and what the log has beside them, each averaged over bins of `bin_steps` steps.

    Attributes:
        bin_steps: number of steps in a bin; 1 if every step is a point.
        smoothing_steps: time constant of the smoothed loss, in steps.
        step: int64 [n], the last step of each bin that has a line in the log.
        loss, lowest, highest, smoothed: [n]; NaN in a bin without a finite loss.
        learning_rate, images_per_s, wait_ms: [n], NaN where unknown. Speeds are averaged over the images.
        metrics: [n] for each metric of the user, by name.
        last_loss: the loss of the last step, possibly NaN.
        num_lines: number of lines, thus of losses.
        num_nonfinite: number of losses that are NaN or infinite.
        first_nonfinite: the step of the first of these, None without one.
        num_unreadable: number of lines that are not losses, and were skipped.
        started, ended: when the first and the last loss were recorded, in seconds since 1970; NaN if unknown.
    """

    bin_steps: int
    smoothing_steps: float
    step: Floats
    loss: Floats
    lowest: Floats
    highest: Floats
    smoothed: Floats
    learning_rate: Floats
    images_per_s: Floats
    wait_ms: Floats
    metrics: Mapping[str, Floats]
    last_loss: float
    num_lines: int
    num_nonfinite: int
    first_nonfinite: int | None
    num_unreadable: int
    started: float
    ended: float

    @property
    def wall_s(self) -> float:
        """The seconds from the first loss to the last."""
        return self.ended - self.started

    def faults(self, name: str) -> str:
        """Return what is wrong with the log of the run `name`, "" for nothing."""
        parts = []
        if self.num_nonfinite:
            verb = "is" if self.num_nonfinite == 1 else "are"
            losses = f"{quantity(self.num_nonfinite, 'loss')} of {name}"
            parts.append(f"{losses} {verb} NaN or infinite, first at step {self.first_nonfinite:,}.")
        if self.num_unreadable:
            parts.append(f"{quantity(self.num_unreadable, 'line')} of its loss.jsonl cannot be read.")
        return " ".join(parts)


def read_curves(run: Path, most_points: int) -> Curves | Absent:
    """Read the loss log of a run folder, in one pass and bounded memory; a log that still grows is read to its end now.

    Args:
        run: the run folder.
        most_points: the largest number of bins.
    """
    try:
        last = last_logged_step(run / LOSS_LOG_NAME)
        if last is None:
            last = _last_step(run)
        if last is None:
            return Absent(f"{LOSS_LOG_NAME} has no losses yet")
        bins = _Bins(-(-(last + 1) // most_points), last)
        log, num_unreadable = LossLog(run / LOSS_LOG_NAME, _CHUNK_BYTES), 0
        while True:
            batch = log.read()
            bins.add(batch.rows)
            num_unreadable += batch.num_unreadable
            if not batch.more:
                return bins.curves(num_unreadable) if bins.num_lines else Absent(f"{LOSS_LOG_NAME} has no losses yet")
    except OSError as error:
        return Absent(f"{LOSS_LOG_NAME} cannot be read ({error.strerror or error})")


def _last_step(run: Path) -> int | None:
    """Return the highest step of a log whose last line is damaged, None if no line is a loss."""
    log, last = LossLog(run / LOSS_LOG_NAME, _CHUNK_BYTES), None
    while True:
        batch = log.read()
        if len(batch.rows):
            last = max(last or 0, int(batch.rows.step.max()))
        if not batch.more:
            return last


class _Bins:
    """Sums over bins of `width` steps, up to the step `last`; later steps, of a log that grows, are left out."""

    def __init__(self, width: int, last: int) -> None:
        self.width, self.last = width, last
        self.num_lines = 0
        self._sums: dict[str, tuple[Floats, Floats]] = {}  # for each column, the sum and the number of its values
        self._num_bins = last // width + 1
        self._low = np.full(self._num_bins, np.inf)
        self._high = np.full(self._num_bins, -np.inf)
        self._newest = np.zeros(self._num_bins, np.int64)
        self._nonfinite = np.zeros(self._num_bins, np.int64)
        self._first_nonfinite: int | None = None
        self._lines = np.zeros(self._num_bins, np.int64)
        self._last_loss, self._started, self._ended = math.nan, math.nan, math.nan

    def add(self, rows: LossRows) -> None:
        rows = rows.take(rows.step <= self.last)
        if not len(rows):
            return
        # A line is void if a later one has the same or a lower step: the run was resumed from before it.
        lowest_later = np.minimum.accumulate(rows.step[::-1])[::-1]
        rows = rows.take(np.append(rows.step[:-1] < lowest_later[1:], True))
        self._forget_from(int(rows.step[0]))
        slots = rows.step // self.width
        finite = np.isfinite(rows.loss)
        np.add.at(self._lines, slots, 1)
        np.add.at(self._nonfinite, slots, ~finite)
        np.minimum.at(self._low, slots[finite], rows.loss[finite])
        np.maximum.at(self._high, slots[finite], rows.loss[finite])
        np.maximum.at(self._newest, slots, rows.step)
        self._add_column("loss", slots, rows.loss)
        self._add_column("lr", slots, rows.learning_rate)
        self._add_column("wait_ms", slots, rows.wait_ms)
        with np.errstate(divide="ignore"):
            self._add_column("seconds_per_image", slots, 1 / rows.images_per_s)
        self._add_metrics(slots, rows)
        if self._first_nonfinite is None and not finite.all():
            self._first_nonfinite = int(rows.step[~finite][0])
        self.num_lines = int(self._lines.sum())
        self._last_loss = float(rows.loss[-1])
        times = rows.time_s[np.isfinite(rows.time_s)]
        if len(times):
            self._started = float(times[0]) if math.isnan(self._started) else self._started
            self._ended = float(times[-1])

    def _add_column(self, name: str, slots: npt.NDArray[np.int64], values: Floats) -> None:
        total, count = self._sums.setdefault(name, (np.zeros(self._num_bins), np.zeros(self._num_bins)))
        finite = np.isfinite(values)
        np.add.at(total, slots[finite], values[finite])
        np.add.at(count, slots[finite], 1)

    def _add_metrics(self, slots: npt.NDArray[np.int64], rows: LossRows) -> None:
        names = {name: None for each in rows.metrics for name in each}
        for name in names:
            if f"metric {name}" in self._sums or len(self._metric_names()) < _MOST_METRICS:
                values = np.array([each.get(name, math.nan) for each in rows.metrics])
                self._add_column(f"metric {name}", slots, values)

    def _metric_names(self) -> list[str]:
        return [name.removeprefix("metric ") for name in self._sums if name.startswith("metric ")]

    def _forget_from(self, step: int) -> None:
        """Clear the bins that begin at a step or later; those of an earlier launch that was rewound."""
        first = -(-step // self.width)
        if not self._lines[first:].any():
            return
        self._lines[first:] = self._nonfinite[first:] = self._newest[first:] = 0
        self._low[first:], self._high[first:] = np.inf, -np.inf
        for total, count in self._sums.values():
            total[first:] = count[first:] = 0
        if self._first_nonfinite is not None and self._first_nonfinite >= step:
            self._first_nonfinite = None

    def curves(self, num_unreadable: int) -> Curves:
        used = self._lines > 0
        mean = {}
        for name, (total, count) in self._sums.items():
            mean[name] = np.where(count > 0, total / np.maximum(count, 1), np.nan)[used]
        step = self._newest[used].astype(np.float64)
        num_finite = (self._lines - self._nonfinite)[used]
        smoothing_steps = max(_LEAST_SMOOTHED_STEPS, _SMOOTHED_PART * self.last)
        with np.errstate(divide="ignore"):
            images_per_s = 1 / mean["seconds_per_image"]
        return Curves(
            bin_steps=self.width,
            smoothing_steps=smoothing_steps,
            step=step,
            loss=mean["loss"],
            lowest=np.where(num_finite > 0, self._low[used], np.nan),
            highest=np.where(num_finite > 0, self._high[used], np.nan),
            smoothed=smooth(step, mean["loss"], smoothing_steps),
            learning_rate=mean["lr"],
            images_per_s=np.where(np.isfinite(images_per_s), images_per_s, np.nan),
            wait_ms=mean["wait_ms"],
            metrics={name: mean[f"metric {name}"] for name in self._metric_names()},
            last_loss=self._last_loss,
            num_lines=self.num_lines,
            num_nonfinite=int(self._nonfinite.sum()),
            first_nonfinite=self._first_nonfinite,
            num_unreadable=num_unreadable,
            started=self._started,
            ended=self._ended,
        )


def smooth(step: Floats, values: Floats, smoothing_steps: float) -> Floats:
    """Return an exponential moving average without start-up bias; NaN values are left out, and stay NaN.

    Args:
        step: [n], ascending; a gap of d steps weights what came before by exp(-d / `smoothing_steps`).
        values: [n].
        smoothing_steps: the time constant.
    """
    total = weight = 0.0
    before = step[0] - 1 if len(step) else 0.0
    smoothed = np.full(len(values), np.nan)
    for index, (at, value) in enumerate(zip(step.tolist(), values.tolist(), strict=True)):
        kept = math.exp(-(at - before) / smoothing_steps)
        if not math.isnan(value):
            total, weight, before = kept * total + (1 - kept) * value, kept * weight + (1 - kept), at
            smoothed[index] = total / weight
    return smoothed
