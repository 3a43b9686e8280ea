"""All losses so far in a fixed number of bins, smoothed, and the time per step: what the chart of a terminal shows.

Must not know: files, terminals, jax.
"""

import statistics
from collections import deque

import numpy as np

from loopfeed.engine.commands.loss_chart import LossCurve
from loopfeed.engine.records.binned_log import BinnedLog, newest_rows
from loopfeed.engine.records.loss_log import NO_ROWS, Floats, LossRows

_RATE_WINDOW_STEPS = 128


class BinnedLosses:
    """A summary of all losses read so far, in a fixed number of bins.

    Smoothing is an exponential moving average without start-up bias: mean_t = (1 - s) Σ s^(t-i) loss_i / (1 - s^t),
    the bias correction of Adam (Kingma and Ba, 2015). A NaN or infinite loss is counted, but not averaged.
    When a later row has a lower step (after a resume from a snapshot), the newer rows replace the older ones.

    Args:
        smoothing: s, at least 0 (no smoothing) and below 1.
        last_steps: keep only this many newest steps; None keeps all. Exact up to the width of a bin,
            which is at most `2 * last_steps / num_bins`, rounded up.
        num_bins: number of bins, even and at least 2. With more bins than dot columns, a chart loses no detail.
    """

    def __init__(self, smoothing: float = 0.9, last_steps: int | None = None, num_bins: int = 4096) -> None:
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing must be at least 0 and below 1, got {smoothing}; 0 turns it off")
        if last_steps is not None and last_steps < 1:
            raise ValueError(f"last_steps must be at least 1, got {last_steps}; leave it out to keep every step")
        if num_bins < 2 or num_bins % 2:
            raise ValueError(f"num_bins must be even and at least 2, got {num_bins}; the default is 4096")
        self._smoothing = smoothing
        self._last_steps = last_steps
        self._num_bins = num_bins
        self.clear()

    def clear(self) -> None:
        """Remove all losses, for example because the log has been replaced."""
        self._bins = BinnedLog(self._num_bins, last_steps=self._last_steps)
        self._mean = 0.0
        self._weight = 0.0
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RATE_WINDOW_STEPS)
        self._speeds: deque[float] = deque(maxlen=_RATE_WINDOW_STEPS)
        self.newest: LossRows = NO_ROWS

    @property
    def last_step(self) -> int | None:
        """The newest step; None if there is none yet."""
        return int(self.newest.step[-1]) if len(self.newest) else None

    @property
    def smoothed(self) -> float:
        """The current smoothed loss; NaN before the first finite loss."""
        return self._mean / self._weight if self._weight else float("nan")

    @property
    def seconds_per_step(self) -> float:
        """The mean time per step over the newest steps in the log; NaN if fewer than two of them have a usable time."""
        if len(self._recent) < 2:
            return float("nan")
        (first_step, first_time), (last_step, last_time) = self._recent[0], self._recent[-1]
        seconds = (last_time - first_time) / (last_step - first_step)
        return seconds if seconds > 0 else float("nan")

    @property
    def images_per_s(self) -> float:
        """The median of the images per second of the newest steps in the log; NaN if none of them has a speed."""
        return statistics.median(self._speeds) if self._speeds else float("nan")

    def add(self, rows: LossRows) -> None:
        """Add the next rows of the log; rows must come in file order."""
        if not len(rows):
            return
        rows = newest_rows(rows)
        self._forget_from(int(rows.step[0]))
        self.newest = rows.tail(1)
        tail = rows.tail(_RATE_WINDOW_STEPS)
        self._recent.extend((int(s), float(t)) for s, t in zip(tail.step, tail.time_s, strict=True) if np.isfinite(t))
        self._speeds.extend(float(speed) for speed in tail.images_per_s if np.isfinite(speed))
        smoothed = np.where(np.isfinite(rows.loss), self._smooth(rows.loss), np.nan)
        self._bins.add({"step": rows.step.astype(np.float64), "loss": rows.loss, "smoothed": smoothed})

    def curve(self) -> LossCurve:
        """Return the loss curve as at most `num_bins` points in order of step."""
        bins = self._bins
        used = bins.used
        if self._last_steps is not None and self.last_step is not None:
            used &= bins.starts + bins.width > self.last_step - self._last_steps + 1
        has_loss = bins.part("count", "loss") > 0
        return LossCurve(
            step=bins.mean("step")[used],
            low=np.where(has_loss, bins.part("low", "loss"), np.nan)[used],
            high=np.where(has_loss, bins.part("high", "loss"), np.nan)[used],
            smoothed=bins.mean("smoothed")[used],
            num_broken=(bins.part("count", "step") - bins.part("count", "loss"))[used].astype(np.int64),
        )

    def _smooth(self, losses: Floats) -> Floats:
        smoothing, mean, weight = self._smoothing, self._mean, self._weight
        smoothed = []
        for loss in losses.tolist():
            if loss - loss == 0.0:  # finite; a call to math.isfinite would double the time of this loop
                mean = smoothing * mean + (1 - smoothing) * loss
                weight = smoothing * weight + (1 - smoothing)
            smoothed.append(mean / weight if weight else loss)
        self._mean, self._weight = mean, weight
        return np.array(smoothed, np.float64)

    def _forget_from(self, step: int) -> None:
        """Drop the losses from `step` on, because the run was resumed from an earlier step."""
        if self.last_step is None or step > self.last_step:
            return
        while self._recent and self._recent[-1][0] >= step:
            self._recent.pop()
        if not self._bins.forget_from(step):
            self._bins = BinnedLog(self._num_bins, last_steps=self._last_steps)
            self.newest = NO_ROWS
