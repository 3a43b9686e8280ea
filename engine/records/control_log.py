"""`RUN/control.jsonl`: a log of the requests that took effect in a run, each with the step at which it did.

A request is written before it takes effect. Owns the lines and what a resumed run must know about them. Must not know:
how requests arrive, jax.

Each line ends with the SHA-256 of itself and of all lines before it, so a changed, removed or moved line is noticed. If
only the last lines are removed, the rest still reads as a complete log; the snapshots and `result.json` record its
length. Lines of older runs have no digest, and a log may begin with such lines.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.control.event import ControlEvent
from engine.control.request import parse_fields
from engine.records.digests import SEAL, LogState, RunningDigest, json_digest
from engine.records.json_lines import JsonLines, read_lines

CONTROL_LOG_NAME = "control.jsonl"


class ControlLog:
    """An append-only log of events, for use by one thread at a time.

    When `append` returns, the operating system has the line: it survives a crash of the process. If a crash truncated
    the last line, the line is removed; its event never took effect.

    Args:
        path: the file, created at the first append.
        begun: the digest of the file's current content; None computes it from the file.
    """

    def __init__(self, path: Path, begun: RunningDigest | None = None) -> None:
        self._lines = JsonLines(path, begun)
        self._is_open = False

    def append(self, event: ControlEvent) -> None:
        """Write an event; call this before the event takes effect.

        Raises:
            OSError: if it cannot be written; the file is then unchanged.
        """
        if not self._is_open:
            self._lines.open()
            self._is_open = True
        values = json.loads(event.to_json())
        self._lines.append(json.dumps(values | {SEAL: _line_digest(self._lines.state().sha256, values)}))

    def state(self) -> LogState:
        """Return the log's size and digest; may be called from any thread."""
        return self._lines.state()

    def sync(self) -> None:
        """Sync all appended lines to the disk, including lines from earlier launches; do nothing if there are none.

        Raises:
            OSError: if the disk failed; LostFileError if the file was removed or replaced.
        """
        self._lines.sync()

    def close(self) -> None:
        """Close the file if it is open."""
        self._lines.close()
        self._is_open = False


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
