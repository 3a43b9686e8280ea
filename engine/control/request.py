"""Requests to a run in progress, and their JSON format.

An event is a request together with the batch at which it took effect; a resumed run repeats it.
"""

import json
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
# Normal float32 numbers: the device flushes smaller ones to 0, and larger ones overflow.
_SMALLEST_FACTOR, _LARGEST_FACTOR = 2.0**-126, (2 - 2.0**-23) * 2.0**127

CALLBACK_ORIGIN = "callback"
"""The beginning of the ids of requests that callbacks made, which no other request has."""


def new_request_id() -> str:
    """Return a unique id for a request; sorting ids puts them in order of creation."""
    return f"{time.time_ns():020d}-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class ControlRequest:
    """A request for a run in progress to perform one or more actions at the same step.

    Attributes:
        id: 1 to 100 letters, digits, `-` or `_`; also the name of the request's file.
        learning_rate_factor: multiplies the scheduled learning rate from the next step on, until another request
            changes it; 0, or a positive normal float32. None does not change the factor.
        snapshot, evaluate: whether to take a snapshot, or to evaluate, after the next step.
        stop: whether to stop before the next step.

    Raises:
        ValueError: if a value is out of range, or nothing is requested.
    """

    id: str = field(default_factory=new_request_id)
    learning_rate_factor: float | None = None
    snapshot: bool = False
    evaluate: bool = False
    stop: bool = False

    def __post_init__(self) -> None:
        check_request_id(self.id)
        check_learning_rate_factor(self.learning_rate_factor)
        check_flags(snapshot=self.snapshot, evaluate=self.evaluate, stop=self.stop)
        if self.learning_rate_factor is None and not (self.snapshot or self.evaluate or self.stop):
            raise ValueError(
                "a request must ask for at least one action, but this one asks for none: "
                "set learning_rate_factor, snapshot, evaluate or stop"
            )

    def to_json(self) -> str:
        """Return the request as one line of JSON, without the newline."""
        return json.dumps({name: getattr(self, name) for name in _REQUEST_FIELDS}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> "ControlRequest":
        """Read a request written by `to_json`.

        Raises:
            ValueError: if the text is not such a request.
        """
        return cls(**parse_fields(text, _REQUEST_FIELDS))


_REQUEST_FIELDS = ("id", "learning_rate_factor", "snapshot", "evaluate", "stop")


def origin_of(request_id: str) -> str:
    """Return who made a request: "callback" or "control-run"."""
    return CALLBACK_ORIGIN if request_id.startswith(f"{CALLBACK_ORIGIN}-") else "control-run"


def check_request_id(value: object) -> None:
    """Raise ValueError unless `value` is a valid request id, which must also be a valid file name."""
    if not (isinstance(value, str) and _ID.fullmatch(value)):
        raise ValueError(
            f"a request's id must be 1 to 100 letters, digits, - or _, got {value!r}; omit it to have one generated"
        )


def check_learning_rate_factor(value: object) -> None:
    """Raise ValueError unless `value` is None, 0 or a positive normal float32 number."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"learning_rate_factor must be a number, got {value!r}; 1 restores the schedule")
    if not (value == 0 or _SMALLEST_FACTOR <= value <= _LARGEST_FACTOR):
        raise ValueError(
            f"learning_rate_factor must be 0 or from 1.2e-38 to 3.4e38, got {value!r}; 1 restores the schedule"
        )


def check_flags(**flags: object) -> None:
    """Raise ValueError unless every flag is True or False; the message names the first flag that is not."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")


def parse_fields(text: str | bytes, names: tuple[str, ...]) -> dict[str, Any]:
    """Parse a JSON object that must have exactly the fields `names`, each once.

    Raises:
        ValueError: if the text is anything else.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("must be a JSON object, but is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, but is of type {type(value).__name__}")
    if differing := sorted(set(names) ^ set(value)):
        raise ValueError(
            f"must have the fields {', '.join(names)}, but these are missing or unknown: {', '.join(differing)}"
        )
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("must have each field once, but a field is repeated")
    return values


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
