"""The losses and evaluations of all launches of a run, as arrays by name, as data frames and as charts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.charts.figure import Figure
from loopfeed.engine.charts.loss_charts import charts_of
from loopfeed.engine.records.binned_log import BinnedLog, newest_rows
from loopfeed.engine.records.evaluation_log import EvaluationLog
from loopfeed.engine.records.loss_log import EVALUATION_LOG_NAME, LOSS_LOG_NAME, Floats, LossLog, LossRows
from loopfeed.engine.stream.sinks import EvaluationRecord

if TYPE_CHECKING:
    import pandas as pd

_CHUNK_BYTES = 1 << 22
_MOST_POINTS = 600


@dataclass(frozen=True, eq=False)
class History:
    """Every step of a run so far, of all its launches, and its evaluations.

    Attributes:
        step: int64 [n], updates done, from 1.
        loss: float32 [n], the mean over each batch.
        learning_rate: float64 [n].
        images_per_s: float64 [n].
        wait_ms: float64 [n], milliseconds that the loop waited for each batch.
        time: float64 [n], seconds since the Unix epoch.
        metrics: your metrics by name, float64 [n] each. Like the columns above it is NaN where it is not known: a run
            without a folder keeps its losses alone.
        evaluations: the evaluations, one for each step, oldest first.

    Example:
        >>> history = open_run("run").history
        >>> history.loss.shape, history.evaluated["top1"].tolist()
        ((20,), [1.0])
    """

    step: NDArray[np.int64]
    loss: NDArray[np.float32]
    learning_rate: Floats
    images_per_s: Floats
    wait_ms: Floats
    time: Floats
    metrics: Mapping[str, Floats] = field(default_factory=dict)
    evaluations: tuple[EvaluationRecord, ...] = ()

    def __len__(self) -> int:
        return len(self.step)

    def __repr__(self) -> str:
        return f"History({len(self):,} steps, {len(self.evaluations):,} evaluations)"

    @property
    def evaluated(self) -> Mapping[str, NDArray[Any]]:
        """The numbers of the evaluations by name, [m] each, such as step, num_images, top1, loss and your metrics."""
        found = self.evaluations
        names = dict.fromkeys(
            name for each in found for name, value in each.metrics.items() if isinstance(value, int | float)
        )
        plain: dict[str, NDArray[Any]] = {
            name: np.array([getattr(each, name) for each in found], np.int64) for name in ("step", "num_images")
        }
        plain |= {
            name: np.array([getattr(each, name) for each in found], np.float64)
            for name in ("top1", "top5", "loss", "time")
        }
        return plain | {name: np.array([_number(each, name) for each in found], np.float64) for name in names}

    def frame(self) -> "pd.DataFrame":
        """Return the steps as a data frame of pandas, a row for each step.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        names = ("loss", "learning_rate", "images_per_s", "wait_ms", "time")
        columns = {name: getattr(self, name) for name in names} | dict(self.metrics)
        return data_frame({"step": self.step, **columns}).set_index("step")

    def evaluation_frame(self) -> "pd.DataFrame":
        """Return the evaluations as a data frame of pandas, as `frame`."""
        return data_frame(self.evaluated).set_index("step")

    def plot(self) -> Figure:
        """Return charts of the loss, the accuracies and the learning rate, which a notebook shows."""
        bins = BinnedLog(_MOST_POINTS, -(-(int(self.step[-1]) + 1) // _MOST_POINTS) if len(self) else 1)
        if len(self):
            columns = {"loss": self.loss.astype(np.float64), "lr": self.learning_rate}
            bins.add({"step": self.step.astype(np.float64), **columns})
        return Figure(charts_of(bins, self.evaluations))


def read_history(folder: Path, until_step: int | None = None) -> History:
    """Read the logs of a run folder, which may still grow.

    Args:
        folder: the run folder.
        until_step: the last step; None is the last one now.

    Raises:
        OSError: a log cannot be read.
    """
    last = math.inf if until_step is None else until_step
    rows = _read_rows(folder / LOSS_LOG_NAME)
    rows = rows.take(rows.step <= last)
    names = dict.fromkeys(name for metrics in rows.metrics for name in metrics)
    # A later line replaces an earlier one of the same step.
    by_step = {record.step: record for record in EvaluationLog(folder / EVALUATION_LOG_NAME).read()}
    return History(
        step=rows.step,
        loss=rows.loss.astype(np.float32),
        learning_rate=rows.learning_rate,
        images_per_s=rows.images_per_s,
        wait_ms=rows.wait_ms,
        time=rows.time_s,
        metrics={name: np.array([each.get(name, math.nan) for each in rows.metrics]) for name in names},
        evaluations=tuple(by_step[step] for step in sorted(by_step) if step <= last),
    )


def _read_rows(path: Path) -> LossRows:
    log, parts, more = LossLog(path, _CHUNK_BYTES), list[LossRows](), True
    while more:
        batch = log.read()
        parts, more = [*([] if batch.restarted else parts), batch.rows], batch.more
    return newest_rows(LossRows.joined(parts))


def history_in_memory(
    losses: NDArray[np.float32], first_step: int, evaluations: tuple[EvaluationRecord, ...]
) -> History:
    """Return the history of a run without a folder; `first_step` is that of the first loss, from 1."""
    unknown = np.full(len(losses), math.nan)
    steps = np.arange(first_step, first_step + len(losses))
    return History(steps, losses, unknown, unknown, unknown, unknown, evaluations=evaluations)


def data_frame(columns: Mapping[str, Any]) -> "pd.DataFrame":
    """Return columns as a data frame of pandas.

    Raises:
        ModuleNotFoundError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise ModuleNotFoundError(
            "a data frame needs the package pandas, which is not installed: pip install pandas, or use the arrays",
            name="pandas",
        ) from None
    return pd.DataFrame(dict(columns))


def _number(record: EvaluationRecord, name: str) -> float:
    value = record.metrics.get(name)
    return float(value) if isinstance(value, int | float) else math.nan
