"""Control events: requests together with the pull of batches at which each took effect. A resumed run repeats them."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from loopfeed.engine.control.request import check_flags, check_learning_rate_factor, check_request_id, parse_fields

_MAX_COUNT = 2**31  # the device counts in int32


@dataclass(frozen=True)
class ControlEvent:
    """A request, together with the pull and the time at which it took effect; stored as one line of `control.jsonl`.

    Attributes:
        pull: index of the batch, from 0, with which the request reaches the program.
        step: the update to which the batch belongs, from 1.
        learning_rate_factor: multiplies the scheduled learning rate from this batch on; None changes no factor.
        snapshot, evaluate: whether to take a snapshot, or to evaluate, after the update.
        stop: whether to stop before the update.
        request: the id of the request.
        time: seconds since the Unix epoch.

    Raises:
        ValueError: if a value is out of range.
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
            raise ValueError(f"time must be seconds since the Unix epoch, got {self.time!r}; pass time.time()")

    def to_json(self) -> str:
        """Return the event as one line of JSON, without the newline and without loss of precision."""
        return json.dumps(asdict(self), allow_nan=False)

    def describe(self) -> str:
        """Return what the event does, such as "snapshot after step 3"."""
        parts = []
        if self.learning_rate_factor is not None:
            parts.append(f"learning-rate factor {self.learning_rate_factor:g} from step {self.step}")
        if self.evaluate:
            parts.append(f"evaluation after step {self.step}")
        if self.snapshot:
            parts.append(f"snapshot after step {self.step}")
        if self.stop:
            parts.append(f"stopping before step {self.step}")
        return ", ".join(parts)

    @classmethod
    def from_json(cls, text: str | bytes) -> "ControlEvent":
        """Read an event written by `to_json`.

        Raises:
            ValueError: if the text is not such an event.
        """
        return cls(**parse_fields(text, tuple(cls.__dataclass_fields__)))


def _check_count(name: str, value: object, *, lowest: int) -> None:
    if type(value) is not int or not lowest <= value < _MAX_COUNT:
        raise ValueError(f"{name} must be an integer from {lowest} to 2**31 - 1, got {value!r}")


def factor_before(events: Iterable[ControlEvent], batch_index: int) -> float:
    """Return the learning-rate factor set by the events before `batch_index`, or 1 if they set no factor.

    The event at the latest batch decides; of several at that batch, the last one.
    """
    factor, latest = 1.0, -1
    for event in events:
        if event.learning_rate_factor is not None and latest <= event.pull < batch_index:
            factor, latest = event.learning_rate_factor, event.pull
    return factor


def events_at(events: Iterable[ControlEvent], batch_index: int) -> tuple[ControlEvent, ...]:
    """Return the events of the batch `batch_index`, in the given order."""
    return tuple(event for event in events if event.pull == batch_index)
