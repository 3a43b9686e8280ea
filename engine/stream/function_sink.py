"""A plain function as a sink of the loss stream."""

from collections.abc import Callable, Iterable
from typing import Any, cast

from loopfeed.engine.given_values import check_takes
from loopfeed.engine.stream.sinks import EvaluationRecord, LossRecord, Sink

type RecordFunction = Callable[[LossRecord | EvaluationRecord], Any]
"""A function that is called with each record of a run."""

_METHODS = ("open", "write", "write_evaluation", "close")


class FunctionSink:
    """A sink that calls a function with each loss and each evaluation.

    Args:
        function: called with each record, once and in order.
    """

    def __init__(self, function: RecordFunction) -> None:
        self._function = function

    def open(self) -> None:
        """Do nothing."""

    def write(self, record: LossRecord) -> None:
        """Call the function with a loss."""
        self._function(record)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Call the function with an evaluation."""
        self._function(record)

    def close(self) -> None:
        """Do nothing."""


def as_sinks(given: Iterable[Sink | RecordFunction]) -> list[Sink]:
    """Return sinks as a list, with each function of a record made one.

    Raises:
        ValueError: it is not a list, or one of them is neither a sink nor a function.
    """
    if not isinstance(given, Iterable) or isinstance(given, str) or hasattr(given, "write"):
        raise ValueError(f"sinks must be a list of sinks and functions, got {type(given).__name__}: give sinks=[…]")
    return [as_sink(each) for each in given]


def as_sink(given: Sink | RecordFunction) -> Sink:
    """Return a sink unchanged, and a function as a sink.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(given, type):
        raise ValueError(f"a sink must be an object, got the class {given.__name__}: give {given.__name__}()")
    missing = [name for name in _METHODS if not callable(getattr(given, name, None))]
    if not missing:
        for name in ("write", "write_evaluation"):
            check_takes(f"{type(given).__name__}.{name}", getattr(given, name), "(record)", 0)
        return cast(Sink, given)
    if callable(given) and "write" in missing:
        check_takes("a sink that is a function", given, "(record)", 0)
        return FunctionSink(given)
    raise ValueError(
        f"a sink must be a function of a record, or have {', '.join(_METHODS)}, got {type(given).__name__}, which has "
        f"no {', '.join(missing)}: define what is missing"
    )
