"""What every logger can write: numbers, histograms, pictures and tables; and whether its package is installed."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
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


def has_package(package: str) -> bool:
    """Return whether a package is installed, without importing it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def install_hint(package: str, extra: str) -> str:
    """Return what is missing and how to install it."""
    return f"the package {package}, which is not installed: pip install 'loopfeed[{extra}]'"


def check_package(package: str, user: str, extra: str) -> None:
    """Raise ModuleNotFoundError if a package that `user` needs is not installed; `extra` of loopfeed installs it."""
    if not has_package(package):
        raise ModuleNotFoundError(f"{user} needs {install_hint(package, extra)}", name=package)
