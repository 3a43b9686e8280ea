"""A plain function as a sink of the loss stream."""

from collections.abc import Callable
from typing import Any, cast

from engine.stream.sinks import EvaluationRecord, LossRecord, Sink

type RecordFunction = Callable[[LossRecord | EvaluationRecord], Any]
"""A function that is called with each record of a run."""


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


def as_sink(given: Sink | RecordFunction) -> Sink:
    """Return a sink unchanged, and a function as a sink.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(given, type):
        raise ValueError(f"a sink must be an object, got the class {given.__name__}: give {given.__name__}()")
    if hasattr(given, "write"):
        return cast(Sink, given)
    if callable(given):
        return FunctionSink(given)
    raise ValueError(
        "a sink must be a function of a record, or have open, write, write_evaluation and close, got "
        f"{type(given).__name__}: define one"
    )
