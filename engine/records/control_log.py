"""`RUN/control.jsonl`: a log of the requests that took effect in a run, each with the step at which it did.

A request is written before it takes effect. Owns the lines and what a resumed run must know about them. Must not know:
how requests arrive, jax.

Each line ends with the SHA-256 of itself and of all lines before it, so a changed, removed or moved line is noticed. If
only the last lines are removed, the rest still reads as a complete log; the snapshots and `result.json` record its
length. Lines of older runs have no digest, and a log may begin with such lines.
"""

import hashlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopfeed.engine.control.recording import Confirm
from loopfeed.engine.control.request import ControlEvent, parse_fields
from loopfeed.engine.records.digests import SEAL, LogState, RunningDigest, json_digest
from loopfeed.engine.records.json_lines import JsonLines, read_lines

CONTROL_LOG_NAME = "control.jsonl"


# How long another thread waits for the one that appends, whose disk may hang.
_TIMEOUT_S = 10.0


class ControlLog:
    """An append-only log of events. One thread at a time may append; the other methods may be called from any thread.

    When `append` returns, the operating system has the line: it survives a crash of the process. If a crash truncated
    the last line, the line is removed; its event never took effect.

    Args:
        path: the file, created at the first append.
        begun: the digest of the file's current content; None computes it from the file.
    """

    def __init__(self, path: Path, begun: RunningDigest | None = None) -> None:
        self._path, self._lines = path, JsonLines(path, begun)
        self._is_open = False
        self._appending = threading.Lock()

    def append(self, event: ControlEvent, confirm: Confirm = lambda: True) -> bool:
        """Write an event; call this before the event takes effect.

        Args:
            event: the event.
            confirm: called once the operating system has the line; if it returns False, the line is removed again.

        Returns:
            Whether the line stays.

        Raises:
            OSError: if it cannot be written; the file is then unchanged.
        """
        with self._appending:
            if not self._is_open:
                self._lines.open()
                self._is_open = True
            self._lines.check_place()
            values = json.loads(event.to_json())
            line = json.dumps(values | {SEAL: _line_digest(self._lines.state().sha256, values)})
            return self._lines.append(line, confirm)

    def state(self) -> LogState:
        """Return the log's size and digest, between two appends: no line follows that may be removed again.

        Raises:
            TimeoutError: if the disk does not accept a line in time.
        """
        if not self._appending.acquire(timeout=_TIMEOUT_S):
            raise TimeoutError(f"{self._path} must accept a line within {_TIMEOUT_S:g} s, but did not: check the disk")
        try:
            return self._lines.state()
        finally:
            self._appending.release()

    def sync(self) -> None:
        """Sync all appended lines to the disk, including lines from earlier launches; do nothing if there are none.

        Raises:
            OSError: if the disk failed; LostFileError if the file was removed or replaced.
        """
        self._lines.sync()

    def close(self) -> None:
        """Close the file if it is open; leave it to the end of the process if the disk hangs."""
        if self._appending.acquire(timeout=0):
            self._lines.close()
            self._is_open = False
            self._appending.release()


class ControlLogError(ValueError):
    """Raised if a line of the log is not a valid event, or has changed since it was written."""


def read_events(path: Path) -> tuple[ControlEvent, ...]:
    """Return all events of a log in file order, or an empty tuple if there is no file.

    A last line without a newline is ignored: it is still being written, or was truncated by a crash.

    Raises:
        ControlLogError: if a line is not a valid event, or has changed since it was written; names file and line.
        ValueError: if a line is longer than any event.
        OSError: if the file cannot be read.
    """
    events, before, must_be_sealed = [], hashlib.sha256(), False
    for number, line in enumerate(read_lines(path), start=1):
        is_sealed = must_be_sealed or b'"%s"' % SEAL.encode() in line
        try:
            events.append(_read_sealed(line, before.hexdigest()) if is_sealed else ControlEvent.from_json(line))
        except ValueError as error:
            raise ControlLogError(
                f"line {number} of {path} is not a valid event ({error}): restore that file"
            ) from error
        # Once a line has a digest, all later lines have one.
        must_be_sealed = is_sealed
        before.update(line)
    return tuple(events)


def _line_digest(before: str, values: Mapping[str, Any]) -> str:
    """Return the digest to append to a line: the SHA-256 of the line's values and the digest of all preceding lines."""
    return json_digest({"before": before, "values": values})


def _read_sealed(line: bytes, before: str) -> ControlEvent:
    """Check the digest at the end of a line, and return its event; `before` is the SHA-256 of all preceding lines."""
    values = parse_fields(line, (*ControlEvent.__dataclass_fields__, SEAL))
    if values.pop(SEAL) != _line_digest(before, values):
        raise ValueError("this line or an earlier one was changed or removed")
    return ControlEvent(**values)
