"""What every logger of experiments can write: numbers, histograms, pictures and tables, each at a step."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from PIL.Image import Image

from loopfeed.engine.crossing.pushed import Histogram


class Moment(NamedTuple):
    """When something was logged.

    Attributes:
        step: updates done.
        time: seconds since the Unix epoch.
    """

    step: int
    time: float


type Cell = str | float | None


class Table(NamedTuple):
    """A table of text and numbers; None is an empty cell."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


class LogRefusedError(Exception):
    """A log cannot be opened; the message says why, and what to do."""


class ExperimentLog(Protocol):
    """An open log of one run, used by one thread. Names are paths such as "train/loss"."""

    def add_numbers(self, at: Moment, numbers: Mapping[str, float]) -> None:
        """Log numbers by name."""
        ...

    def add_histograms(self, at: Moment, histograms: Mapping[str, Histogram]) -> None:
        """Log histograms by name."""
        ...

    def add_picture(self, at: Moment, name: str, picture: Image) -> None:
        """Log a picture."""
        ...

    def add_table(self, at: Moment, name: str, table: Table) -> None:
        """Log a table."""
        ...

    def flush(self) -> None:
        """Write what is buffered; called whenever nothing more is waiting."""
        ...

    def close(self) -> None:
        """Write everything and close the log."""
        ...
