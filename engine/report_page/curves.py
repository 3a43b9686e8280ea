"""The columns of `loss.jsonl` as curves of a bounded number of points. Must not know: HTML, charts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loopfeed.engine.charts.loss_charts import smooth, smoothing_steps
from loopfeed.engine.records.binned_log import BinnedLog, newest_rows
from loopfeed.engine.records.loss_log import LOSS_LOG_NAME, Floats, LossLog, LossRows, last_logged_step
from loopfeed.engine.report_page.absent import Absent
from loopfeed.preprocess.quantities import quantity

_CHUNK_BYTES = 1 << 22
_MOST_METRICS = 8


@dataclass(frozen=True, eq=False)
class Curves:
    """The losses of a run and what the log has beside them, each averaged over bins of `bin_steps` steps."""

    bin_steps: int  # number of steps in a bin; 1 if every step is a point
    smoothing_steps: float  # time constant of the smoothed loss, in steps
    step: Floats  # [n], the last step of each bin that has a line in the log
    loss: Floats  # [n]; NaN in a bin without a finite loss
    lowest: Floats
    highest: Floats
    smoothed: Floats
    learning_rate: Floats  # [n], NaN where unknown. Speeds are averaged over the images.
    images_per_s: Floats
    wait_ms: Floats
    metrics: Mapping[str, Floats]  # [n] for each metric of the user, by name
    num_nonfinite: int  # number of losses that are NaN or infinite
    first_nonfinite: int | None  # the step of the first of these, None without one
    num_unreadable: int  # number of lines that are not losses, and were skipped
    wall_s: float  # the seconds from the first loss to the last, NaN if unknown

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
        last = last_logged_step(run / LOSS_LOG_NAME) or 0
        bins, names = BinnedLog(most_points, -(-(last + 1) // most_points)), dict[str, None]()
        log, num_unreadable, more = LossLog(run / LOSS_LOG_NAME, _CHUNK_BYTES), 0, True
        times_s: list[float] = []
        while more:
            batch = log.read()
            if len(rows := newest_rows(batch.rows)):
                bins.forget_from(int(rows.step[0]))
                bins.add(_columns(rows, names))
                known = rows.time_s[np.isfinite(rows.time_s)].tolist()
                times_s = [*times_s[:1], *known[:1], *known[-1:]]
            num_unreadable, more = num_unreadable + batch.num_unreadable, batch.more
    except OSError as error:
        return Absent(f"{LOSS_LOG_NAME} cannot be read ({error.strerror or error})")
    if not bins.used.any():
        return Absent(f"{LOSS_LOG_NAME} has no losses yet")
    return _curves(bins, tuple(names), num_unreadable, times_s[-1] - times_s[0] if times_s else math.nan)


def _columns(rows: LossRows, names: dict[str, None]) -> dict[str, Floats]:
    """Return the columns of some rows, and add the names of new metrics of the user to `names` while there is room."""
    step = rows.step.astype(np.float64)
    with np.errstate(divide="ignore"):
        seconds_per_image = 1 / rows.images_per_s
    for name in (name for metrics in rows.metrics for name in metrics):
        if len(names) < _MOST_METRICS:
            names.setdefault(name)
    return {
        "step": step,
        "loss": rows.loss,
        "broken": np.where(np.isfinite(rows.loss), np.nan, step),
        "lr": rows.learning_rate,
        "wait_ms": rows.wait_ms,
        "seconds_per_image": seconds_per_image,
    } | {f"metric {name}": np.array([each.get(name, math.nan) for each in rows.metrics]) for name in names}


def _curves(bins: BinnedLog, names: Sequence[str], num_unreadable: int, wall_s: float) -> Curves:
    used = bins.used
    step, loss = bins.part("high", "step")[used], bins.mean("loss")[used]
    time_constant = smoothing_steps(step)
    with np.errstate(divide="ignore"):
        images_per_s = 1 / bins.mean("seconds_per_image")[used]
    num_nonfinite = int(bins.part("count", "broken").sum())
    return Curves(
        bin_steps=bins.width,
        smoothing_steps=time_constant,
        step=step,
        loss=loss,
        lowest=np.where(np.isnan(loss), np.nan, bins.part("low", "loss")[used]),
        highest=np.where(np.isnan(loss), np.nan, bins.part("high", "loss")[used]),
        smoothed=smooth(step, loss, time_constant),
        learning_rate=bins.mean("lr")[used],
        images_per_s=np.where(np.isfinite(images_per_s), images_per_s, np.nan),
        wait_ms=bins.mean("wait_ms")[used],
        metrics={name: bins.mean(f"metric {name}")[used] for name in names},
        num_nonfinite=num_nonfinite,
        first_nonfinite=int(bins.part("low", "broken").min()) if num_nonfinite else None,
        num_unreadable=num_unreadable,
        wall_s=wall_s,
    )
