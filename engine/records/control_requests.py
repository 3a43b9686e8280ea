"""Requests to a running training: files that one process leaves in `RUN/control/` and the running one picks up.

Owns what may be asked for, the files, and the thread that looks for them. Must not know: the control word, when a
request takes effect, jax.
"""

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.records.whole_file import write_whole

CONTROL_FOLDER_NAME = "control"

_SUFFIX = ".json"
_LOOK_EVERY_S = 0.25
_CLOSE_TIMEOUT_S = 2.0
_LONGEST_REQUEST_BYTES = 4096
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


def send_request(run: Path, request: ControlRequest) -> None:
    """Leaves a request for the process that works in the run folder; it is there whole or not at all.

    Raises:
        OSError: where it cannot be written.
    """
    folder = run / CONTROL_FOLDER_NAME
    folder.mkdir(exist_ok=True)
    write_whole(_path_of(folder, request.id), (request.to_json() + "\n").encode())


def withdraw(run: Path, request_id: str) -> bool:
    """Takes a request back.

    Returns:
        True where it was there still, and so will never be taken up; False where it was taken up already, or there
        was none.

    Raises:
        OSError: where it cannot be removed.
    """
    check_request_id(request_id)
    try:
        _path_of(run / CONTROL_FOLDER_NAME, request_id).unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _path_of(folder: Path, request_id: str) -> Path:
    return folder / f"{request_id}{_SUFFIX}"


def remove_requests(run: Path) -> None:
    """Removes the requests in a run folder, whose senders have given up; for whoever has just locked it.

    Those that come from then on are to him, even before he looks for them. Where the disk fails, they stay.
    """
    folder = run / CONTROL_FOLDER_NAME
    with suppress(OSError):
        for name in _names(folder, with_unfinished=True):
            with suppress(OSError):
                (folder / name).unlink()


def _names(folder: Path, *, with_unfinished: bool = False) -> list[str]:
    """Gives the names of the files of requests, in order of time; the unfinished are those of `write_whole`."""
    names = [path.name for path in folder.iterdir()]
    finished = [name for name in names if name.endswith(_SUFFIX)]
    unfinished = [name for name in names if name.startswith(".") and f"{_SUFFIX}." in name]
    return sorted(finished) + (unfinished if with_unfinished else [])


class ControlMailbox:
    """Looks for requests in a run folder, on a thread of its own, and hands each on once, in order of time.

    A request's file is removed before it is handed on. To remove it is to claim it: whoever withdraws a request learns
    for certain whether it will take effect. What is no request is removed. Where the disk fails, no requests come.

    Args:
        run: the run folder.
        deliver: gets each request on the mailbox's thread; must not block. Whatever it raises is dropped.
    """

    def __init__(self, run: Path, deliver: Callable[[ControlRequest], None]) -> None:
        self._folder, self._deliver = run / CONTROL_FOLDER_NAME, deliver
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="control-mailbox", daemon=True)

    def start(self) -> None:
        """Begins to look; called once."""
        self._thread.start()

    def close(self) -> None:
        """Ends the looking; what is under way is waited for, not longer than two seconds (a disk may hang)."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        while not self._closing.is_set():
            # The training goes on, whatever becomes of a request: its sender waits for the log, and tells of it.
            with suppress(Exception):
                self._look()
            self._closing.wait(_LOOK_EVERY_S)

    def _look(self) -> None:
        try:
            names = _names(self._folder)
        except FileNotFoundError:
            return  # nobody has asked for anything yet
        for name in names:
            if self._closing.is_set():
                return
            # One that fails must not hold up the others.
            with suppress(Exception):
                request = self._claim(name)
                if request is not None:
                    self._deliver(request)

    def _claim(self, name: str) -> ControlRequest | None:
        """Reads and removes a file; None where it holds no request, or was withdrawn meanwhile."""
        path = self._folder / name
        content = _read_start(path)
        try:
            path.unlink()
        except FileNotFoundError:
            return None
        try:
            request = ControlRequest.from_json(content)
        except ValueError:
            return None
        return request if _path_of(self._folder, request.id) == path else None


def _read_start(path: Path) -> bytes:
    """Reads a file, and of one longer than any request nothing; never waits for the writer of a pipe."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        content = file.read(_LONGEST_REQUEST_BYTES + 1) or b""
    return content if len(content) <= _LONGEST_REQUEST_BYTES else b""
