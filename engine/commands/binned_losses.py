"""Aggregation of all losses so far into a fixed number of bins, so that memory and redraw time stay bounded.

Owns the bins, the smoothing and the time per step. Must not know: files, terminals, jax.
"""

import statistics
from collections import deque

import numpy as np
import numpy.typing as npt

from loopfeed.engine.commands.loss_chart import LossCurve
from loopfeed.engine.records.loss_log import NO_ROWS, Floats, LossRows

_RATE_WINDOW_STEPS = 128


class _Bins:
    """Bins of `width` steps each, with the sums and extremes of their losses; array index 0 is bin number `first`."""

    def __init__(self, num_bins: int, width: int = 1, first: int = 0) -> None:
        self.width = width
        self.first = first
        self.sums = np.zeros((4, num_bins))  # finite losses, NaN or infinite losses, steps, smoothed losses
        self.low = np.full(num_bins, np.inf)
        self.high = np.full(num_bins, -np.inf)

    @property
    def num_losses(self) -> Floats:
        """The number of losses in each bin, finite or not."""
        return self.sums[0] + self.sums[1]

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """The first step of each bin."""
        return (self.first + np.arange(len(self.low))) * self.width

    def add(self, slots: npt.NDArray[np.int64], sums: Floats, low: Floats, high: Floats) -> None:
        """Add entry i (`sums[:, i]`, `low[i]`, `high[i]`) to the bin at array index `slots[i]`; indices can repeat."""
        for total, part in zip(self.sums, sums, strict=True):
            np.add.at(total, slots, part)
        np.minimum.at(self.low, slots, low)
        np.maximum.at(self.high, slots, high)

    def select(self, keep: npt.NDArray[np.bool_], width: int, first: int) -> "_Bins":
        """Return the bins where `keep` is True, merged into bins of `width` steps (a multiple of the current width)."""
        selected = _Bins(len(self.low), width, first)
        selected.add(self.starts[keep] // width - first, self.sums[:, keep], self.low[keep], self.high[keep])
        return selected


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
        self._bins = _Bins(self._num_bins)
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
        # Ignore a row if a later one has the same or a lower step: the run was resumed from before that row.
        lowest_later = np.minimum.accumulate(rows.step[::-1])[::-1]
        rows = rows.take(np.append(rows.step[:-1] < lowest_later[1:], True))
        self._forget_from(int(rows.step[0]))
        self.newest = rows.tail(1)
        tail = rows.tail(_RATE_WINDOW_STEPS)
        self._recent.extend((int(s), float(t)) for s, t in zip(tail.step, tail.time_s, strict=True) if np.isfinite(t))
        self._speeds.extend(float(speed) for speed in tail.images_per_s if np.isfinite(speed))
        smoothed = self._smooth(rows.loss)
        self._make_room(int(rows.step[0]), int(rows.step[-1]))
        finite = np.isfinite(rows.loss)
        sums = np.stack((finite, ~finite, rows.step, np.where(finite, smoothed, 0.0)))
        low, high = np.where(finite, rows.loss, np.inf), np.where(finite, rows.loss, -np.inf)
        slots = rows.step // self._bins.width - self._bins.first
        inside = slots >= 0  # with last_steps, the first rows of a long batch may be too old to keep
        self._bins.add(slots[inside], sums[:, inside], low[inside], high[inside])

    def curve(self) -> LossCurve:
        """Return the loss curve as at most `num_bins` points in order of step."""
        bins = self._bins
        used = bins.num_losses > 0
        if self._last_steps is not None and self.last_step is not None:
            used &= bins.starts + bins.width > self.last_step - self._last_steps + 1
        num, num_broken, step_sum, smooth_sum = bins.sums[:, used]
        has_loss = num > 0
        return LossCurve(
            step=step_sum / (num + num_broken),
            low=np.where(has_loss, bins.low[used], np.nan),
            high=np.where(has_loss, bins.high[used], np.nan),
            smoothed=np.where(has_loss, smooth_sum / np.maximum(num, 1), np.nan),
            num_broken=num_broken.astype(np.int64),
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
        """Drop the bins that begin at `step` or later, because the run was resumed from an earlier step."""
        if self.last_step is None or step > self.last_step:
            return
        bins = self._bins
        keep = (bins.starts < step) & (bins.num_losses > 0)
        self._bins = bins.select(keep, bins.width, bins.first)
        while self._recent and self._recent[-1][0] >= step:
            self._recent.pop()
        if not keep.any():
            self._bins = _Bins(self._num_bins)
            self.newest = NO_ROWS

    def _make_room(self, start: int, last: int) -> None:
        """Widen or shift the bins until they include step `last`; `start` is the oldest step about to be added."""
        if not self._bins.num_losses.any():
            self._bins.first = start // self._bins.width
        while last // self._bins.width - self._bins.first >= self._num_bins:
            bins = self._bins
            used = bins.num_losses > 0
            if self._last_steps is not None and self._num_bins // 2 * bins.width >= self._last_steps:
                first = max(0, last - self._last_steps + 1) // bins.width
                self._bins = bins.select(used & (bins.starts >= first * bins.width), bins.width, first)
            else:
                self._bins = bins.select(used, bins.width * 2, bins.first // 2)
