"""A request that took effect, and what a launch that repeats it must know."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from engine.control.request import check_flags, check_learning_rate_factor, check_request_id, parse_fields

_MAX_COUNT = 2**31  # the device counts in int32


@dataclass(frozen=True)
class ControlEvent:
    """A request that takes effect: one line of the log.

    Attributes:
        pull: the batch, counted from 0, with which it reaches the program.
        step: the update that the pull belongs to, from 1.
        learning_rate_factor: multiplies the schedule's learning rate from this pull on; None leaves it as it is.
        snapshot, evaluate: after the update.
        stop: before the update.
        request: id of the request.
        time: seconds since the epoch.

    Raises:
        ValueError: where a value is not of its range.
    """

    pull: int
    step: int
    learning_rate_factor: float | None
    snapshot: bool
    evaluate: bool
    stop: bool
    request: str
    time: float

    def __post_init__(self) -> None:
        _check_count("pull", self.pull, lowest=0)
        _check_count("step", self.step, lowest=1)
        check_learning_rate_factor(self.learning_rate_factor)
        check_flags(snapshot=self.snapshot, evaluate=self.evaluate, stop=self.stop)
        check_request_id(self.request)
        if isinstance(self.time, bool) or not isinstance(self.time, int | float) or not 0 <= self.time < 2**53:
            raise ValueError(f"time must be seconds since the epoch, got {self.time!r}; give time.time()")

    def to_json(self) -> str:
        """Gives the event as one line of JSON, without its end; every number reads back as it is."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> "ControlEvent":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: where it is anything else.
        """
        return cls(**parse_fields(text, tuple(cls.__dataclass_fields__)))


def _check_count(name: str, value: object, *, lowest: int) -> None:
    if type(value) is not int or not lowest <= value < _MAX_COUNT:
        raise ValueError(f"{name} must be a whole number from {lowest}, below 2**31, got {value!r}")


def factor_before(events: Iterable[ControlEvent], pull: int) -> float:
    """Gives the learning-rate factor that holds when `pull` begins, before its own events; 1 where none was set.

    Of the events at earlier pulls the one at the latest pull counts, and of several there the last of them.
    """
    factor, latest = 1.0, -1
    for event in events:
        if event.learning_rate_factor is not None and latest <= event.pull < pull:
            factor, latest = event.learning_rate_factor, event.pull
    return factor


def events_at(events: Iterable[ControlEvent], pull: int) -> tuple[ControlEvent, ...]:
    """Gives the events at a pull, in their order."""
    return tuple(event for event in events if event.pull == pull)
