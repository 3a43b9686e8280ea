"""Requests to a run in progress, and their JSON format."""

import json
import re
import secrets
import time
from dataclasses import dataclass, field
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
