"""The rows of every batch that one process reads, when several processes train together."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from loopfeed.engine.feed.batches import (
    BatchSource,
    CheckedSource,
    FunctionBatches,
    Labels,
    LendingSource,
    Lent,
    Pixels,
    label_form_of,
    read_meter_of,
    row_words,
)


@runtime_checkable
class RowSource(Protocol):
    """A `BatchSource` that can read some rows of a batch without the others."""

    def fill_rows(self, batch_index: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Read the rows of a batch; as `BatchSource.fill`, with arrays of that many rows."""
        ...


class OwnRows:
    """A source whose batches are some rows of another's.

    A source that cannot read rows alone fills a whole batch, from which the rows are copied.

    Args:
        source: the source of whole batches.
        rows: consecutive rows of each batch.

    Attributes:
        batch, height, width, row_words, label_form, thread_safe, read_meter: as of any source.
    """

    def __init__(self, source: BatchSource, rows: range) -> None:
        self._source, self._rows = source, rows
        self.batch, self.height, self.width = len(rows), source.height, source.width
        self.row_words, self.label_form = row_words(source), label_form_of(source)
        self.thread_safe = source.thread_safe
        self.read_meter = read_meter_of(source)

    def fill(self, batch_index: int, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Read the rows of a batch."""
        source, rows = self._source, self._rows
        if isinstance(source, RowSource):
            source.fill_rows(batch_index, rows, pixels, labels, timeout_s=timeout_s)
            return
        whole: Any = np.zeros((source.batch, *pixels.shape[1:]), pixels.dtype)
        all_labels: Any = np.zeros((source.batch, *labels.shape[1:]), labels.dtype)
        source.fill(batch_index, whole, all_labels, timeout_s=timeout_s)
        own = slice(rows.start, rows.stop)
        pixels[...], labels[...] = whole[own], all_labels[own]

    def check_unchanged(self) -> None:
        """Raise an error if the files of the source were changed."""
        if isinstance(self._source, CheckedSource):
            self._source.check_unchanged()


class OwnLentRows(OwnRows):
    """`OwnRows` of a source that lends rows from its own memory."""

    def lend(self, batch_index: int, labels: Labels, *, timeout_s: float) -> Lent | None:
        """Lend the rows of a batch; see `LendingSource`."""
        source: Any = self._source
        lent: Lent | None = source.lend_rows(batch_index, self._rows, labels, timeout_s=timeout_s)
        return lent


def rows_of(source: BatchSource, rows: range) -> BatchSource:
    """Return a source of some rows of each batch; the source itself if these are all rows."""
    if len(rows) == source.batch:
        return source
    lends = isinstance(source, LendingSource) and hasattr(source, "lend_rows")
    return (OwnLentRows if lends else OwnRows)(source, rows)


class FunctionRows(FunctionBatches):
    """Batches from a user's function that is asked for the rows of this process alone.

    Args:
        function: the user's function.
        rows: the rows of this process, a range.
        batch: images of a whole batch.
        others: as of `FunctionBatches`.
    """

    def __init__(
        self, function: Callable[[int, range], tuple[Any, Any]], rows: range, batch: int, **others: Any
    ) -> None:
        super().__init__(lambda batch_index: function(batch_index, rows), **others)
        found: int = self.batch
        if found != len(rows):
            raise ValueError(
                f"a batch source that takes rows must return those that it is asked for, {len(rows)}, got {found}"
            )
        self.batch = batch

    def fill_rows(self, batch_index: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Copy the rows that the function returns; see `RowSource`."""
        del rows  # those of this process
        self.fill(batch_index, pixels, labels, timeout_s=timeout_s)


def takes_rows(function: Any) -> bool:
    """Return whether a user's batch function has a parameter named `rows`."""
    try:
        return "rows" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in function has no signature
        return False
