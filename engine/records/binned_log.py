"""The columns of a loss log in a bounded number of bins of steps, so that memory stays bounded however long a run is.

Must not know: files, charts, jax.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from loopfeed.engine.records.loss_log import Floats, LossRows

_REDUCE = {"sum": np.add, "count": np.add, "low": np.minimum, "high": np.maximum}
_EMPTY = {"sum": 0.0, "count": 0.0, "low": np.inf, "high": -np.inf}


class BinnedLog:
    """Sums, counts and extremes of the finite numbers of each column, for bins of `width` steps.

    Args:
        num_bins: number of bins, at least 2.
        width: steps in a bin at first; it is doubled when the steps need more bins than there are.
        last_steps: keep only this many newest steps, exact up to the width of a bin; None keeps all.
    """

    def __init__(self, num_bins: int, width: int = 1, last_steps: int | None = None) -> None:
        self.width = width
        self._num_bins, self._last_steps = num_bins, last_steps
        self._first = 0  # the number of the bin at array index 0
        self._parts: dict[tuple[str, str], Floats] = {}

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """The first step of each bin, also of those without rows."""
        return (self._first + np.arange(self._num_bins)) * self.width

    @property
    def used(self) -> npt.NDArray[np.bool_]:
        """Whether each bin has rows."""
        return self.part("count", "step") > 0

    def part(self, kind: str, name: str) -> Floats:
        """Return the "sum", "count", "low" or "high" of a column in each bin."""
        return self._parts.setdefault((kind, name), np.full(self._num_bins, _EMPTY[kind]))

    def mean(self, name: str) -> Floats:
        """Return the mean of a column in each bin; NaN in a bin without a finite number."""
        count = self.part("count", name)
        return np.where(count > 0, self.part("sum", name) / np.maximum(count, 1), np.nan)

    def add(self, columns: Mapping[str, Floats]) -> None:
        """Add rows by their columns [n], of which "step" ascends and is above all steps so far."""
        steps = columns["step"].astype(np.int64)
        self._make_room(int(steps[0]), int(steps[-1]))
        slots = steps // self.width - self._first
        for name, values in columns.items():
            # With last_steps, the first of many rows may be too old to keep.
            there = np.isfinite(values) & (slots >= 0)
            for kind in _REDUCE:
                self._put(kind, name, slots[there], values[there] if kind != "count" else 1)

    def forget_from(self, step: int) -> bool:
        """Drop the bins that begin at a step or later, because the run was resumed from before; return what is left."""
        keep = self.used & (self.starts < step)
        self._select(keep, self.width, self._first)
        return bool(keep.any())

    def _put(self, kind: str, name: str, slots: npt.NDArray[np.int64], values: Floats | int) -> None:
        _REDUCE[kind].at(self.part(kind, name), slots, values)

    def _select(self, keep: npt.NDArray[np.bool_], width: int, first: int) -> None:
        """Keep the bins where `keep` is True, merged into bins of `width` steps (a multiple of the current width)."""
        slots, parts = self.starts[keep] // width - first, self._parts
        self.width, self._first, self._parts = width, first, {}
        for (kind, name), values in parts.items():
            self._put(kind, name, slots, values[keep])

    def _make_room(self, start: int, last: int) -> None:
        """Widen or shift the bins until they include step `last`; `start` is the oldest step about to be added."""
        if not self.used.any():
            self._first = start // self.width
        while last // self.width - self._first >= self._num_bins:
            if self._last_steps is not None and self._num_bins // 2 * self.width >= self._last_steps:
                first = max(0, last - self._last_steps + 1) // self.width
                self._select(self.used & (self.starts >= first * self.width), self.width, first)
            else:
                self._select(self.used, self.width * 2, self._first // 2)


def newest_rows(rows: LossRows) -> LossRows:
    """Return the rows that none behind replaces; a row with the same or a lower step does, after a resume."""
    lowest_later = np.minimum.accumulate(rows.step[::-1])[::-1]
    return rows.take(np.append(rows.step[:-1] < lowest_later[1:], True)) if len(rows) else rows
