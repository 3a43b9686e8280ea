"""`RUN/control.jsonl`: which requests took effect in a run, and where; written before they do.

Owns the lines and what a run that is resumed must know of them. Must not know: how requests arrive, jax.

Each line ends with the SHA-256 of itself and of all lines before it: a changed, removed or moved line is noticed. If
only the last lines are removed, the rest still reads as a whole log; the snapshots and `result.json` record how far it
had come. Lines of older runs have no digest, and a log may begin with these.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.control.event import ControlEvent
from engine.control.request import parse_fields
from engine.records.digests import SEAL, LogState, RunningDigest, json_digest
from engine.records.json_lines import JsonLines
from preprocess.regular_file import read_regular

CONTROL_LOG_NAME = "control.jsonl"

# Some hundred thousand requests.
_MOST_BYTES = 1 << 26


class ControlLog:
    """Appends to a log of events; for one thread at a time.

    A line is with the system when `append` returns: it outlives the process, however that dies. A last line that a
    crash cut short is removed; what it said never took effect.

    Args:
        path: the file, made when there is something to write.
        begun: the digest of what it holds already; None reads the file for it.
    """

    def __init__(self, path: Path, begun: RunningDigest | None = None) -> None:
        self._lines = JsonLines(path, begun)
        self._is_open = False

    def append(self, event: ControlEvent) -> None:
        """Writes an event; to be called before it takes effect.

        Raises:
            OSError: where it cannot be written; the file is then as it was.
        """
        if not self._is_open:
            self._lines.open()
            self._is_open = True
        values = json.loads(event.to_json())
        self._lines.append(json.dumps(values | {SEAL: _line_digest(self._lines.state().sha256, values)}))

    def state(self) -> LogState:
        """Return how far the log has come; from any thread."""
        return self._lines.state()

    def sync(self) -> None:
        """Bring what was appended to the disk, by earlier launches too; do nothing where nothing was.

        Raises:
            OSError: where the disk failed; LostFileError where the file was removed or replaced.
        """
        self._lines.sync()

    def close(self) -> None:
        """Closes the file; does nothing where none is open."""
        self._lines.close()
        self._is_open = False


class ControlLogError(ValueError):
    """A log of events has a line that is no event, or not as it was written."""


def read_events(path: Path) -> tuple[ControlEvent, ...]:
    """Reads all events of a log, in file order; none where there is no file.

    A last line without its end is left out: it is being written, or a crash cut it short.

    Raises:
        ControlLogError: where a line is no event, or not as it was written; names the file and the line.
        OSError: where the file cannot be read.
    """
    try:
        content = read_regular(path, max_bytes=_MOST_BYTES)
    except FileNotFoundError:
        return ()
    events, before, must_be_sealed = [], hashlib.sha256(), False
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        is_sealed = must_be_sealed or b'"%s"' % SEAL.encode() in line
        try:
            events.append(_read_sealed(line, before.hexdigest()) if is_sealed else ControlEvent.from_json(line))
        except ValueError as error:
            raise ControlLogError(
                f"{path} must hold an event a line, line {number} does not ({error}): restore that file"
            ) from error
        # A run that writes digests never goes back to lines without.
        must_be_sealed = is_sealed
        before.update(line + b"\n")
    return tuple(events)


def _line_digest(before: str, values: Mapping[str, Any]) -> str:
    """Return what a line ends with: the SHA-256 of its values and of the digest of all lines before it."""
    return json_digest({"before": before, "values": values})


def _read_sealed(line: bytes, before: str) -> ControlEvent:
    """Return the event of a line that ends with its digest; `before` is the SHA-256 of all lines before it."""
    values = parse_fields(line, (*ControlEvent.__dataclass_fields__, SEAL))
    if values.pop(SEAL) != _line_digest(before, values):
        raise ValueError("it, or a line before it, was changed or removed")
    return ControlEvent(**values)
