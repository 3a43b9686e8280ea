"""What may be asked of a running training, and the form of one request."""

import json
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
# float32: the device takes what is smaller than its smallest normal number for 0, and has nothing above its largest.
_SMALLEST_FACTOR, _LARGEST_FACTOR = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def new_request_id() -> str:
    """Draws an id that no other request has; ids sort by the time they were drawn at."""
    return f"{time.time_ns():020d}-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class ControlRequest:
    """What somebody asks of a running training: one thing or several, at the same step.

    Attributes:
        id: 1 to 100 letters, digits, `-` or `_`; the name of its file.
        learning_rate_factor: multiplies the schedule's learning rate from the next step on, until another is asked
            for; 0, or a normal float32 above it. None leaves the factor as it is.
        snapshot, evaluate: after the next step.
        stop: before the next step.

    Raises:
        ValueError: where a value is not of its range, or nothing is asked for.
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
                "a request must ask for something, and this one asks for nothing: "
                "give a learning_rate_factor, snapshot, evaluate or stop"
            )

    def to_json(self) -> str:
        """Gives the request as one line of JSON, without its end."""
        return json.dumps({name: getattr(self, name) for name in _REQUEST_FIELDS}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> "ControlRequest":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: where it is anything else.
        """
        return cls(**parse_fields(text, _REQUEST_FIELDS))


_REQUEST_FIELDS = ("id", "learning_rate_factor", "snapshot", "evaluate", "stop")


def check_request_id(value: object) -> None:
    """Raises ValueError where `value` cannot be the id of a request, and so the name of a file."""
    if not (isinstance(value, str) and _ID.fullmatch(value)):
        raise ValueError(f"a request's id must be 1 to 100 letters, digits, - or _, got {value!r}; leave it out")


def check_learning_rate_factor(value: object) -> None:
    """Raises ValueError where `value` is neither None nor a factor that the device can apply."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"learning_rate_factor must be a number, got {value!r}; 1 is the schedule itself")
    if not (value == 0 or _SMALLEST_FACTOR <= value <= _LARGEST_FACTOR):
        raise ValueError(
            f"learning_rate_factor must be 0 or from 1.2e-38 to 3.4e38, got {value!r}; 1 is the schedule itself"
        )


def check_flags(**flags: object) -> None:
    """Raises ValueError where a value is neither True nor False, and names it."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")


def parse_fields(text: str | bytes, names: tuple[str, ...]) -> dict[str, Any]:
    """Reads a JSON object that has each of these fields, once, and no other.

    Raises:
        ValueError: where it is anything else.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("must be a JSON object, is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, is {type(value).__name__}")
    if unfit := sorted(set(names) ^ set(value)):
        raise ValueError(f"must have the fields {', '.join(names)}, differs in {', '.join(unfit)}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("must have each field once")
    return values
