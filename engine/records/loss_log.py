"""Reads `RUN/loss.jsonl` while it grows.

Owns which bytes were already read, what counts as a readable line, and what `config.json` and `result.json` record of
the run. Must not know: terminals, drawing, jax.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from loopfeed.engine.records.folder_lock import is_leftover
from loopfeed.engine.records.limits import LONGEST_LINE_BYTES, MOST_JSON_BYTES
from loopfeed.preprocess.printable import printable_line
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.regular_file import open_regular, read_regular

# Here rather than in `run_folder`, which loads the settings and importlib.metadata: 50 ms of a start of 400 ms.
LOSS_LOG_NAME = "loss.jsonl"
EVALUATION_LOG_NAME = "eval.jsonl"
CONFIG_NAME = "config.json"
RESULT_NAME = "result.json"

_MAX_STEP = 2**53  # above it a float64 step is no longer exact
_FINGERPRINT_BYTES = 128  # a line carries its time at its end, so two launches differ within this many bytes

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LossRows:
    """The columns of n lines of the log, in file order; a missing number is NaN."""

    step: npt.NDArray[np.int64]  # [n], from 1
    loss: Floats  # [n], NaN or infinite if the training loss was
    learning_rate: Floats  # [n]
    images_per_s: Floats  # [n]
    wait_ms: Floats  # [n], how long the device waited for the infeed
    time_s: Floats  # [n], unix seconds
    metrics: npt.NDArray[np.object_]  # [n], a dictionary of numbers by name each, empty without metrics

    def __len__(self) -> int:
        return len(self.step)

    def tail(self, num_rows: int) -> "LossRows":
        """Return the last `num_rows` rows, or all rows if there are fewer."""
        return self.take(slice(max(0, len(self) - num_rows), None))

    def followed_by(self, rows: "LossRows") -> "LossRows":
        """Return the concatenation of these rows and the given rows."""
        return LossRows.joined([self, rows])

    @classmethod
    def joined(cls, parts: Sequence["LossRows"]) -> "LossRows":
        """Return the concatenation of rows, none for no parts."""
        columns = zip(*(each._columns() for each in (NO_ROWS, *parts)), strict=True)
        return cls(*map(np.concatenate, columns))

    def take(self, index: slice | npt.NDArray[np.bool_]) -> "LossRows":
        """Return the rows that a slice or a boolean mask [n] selects."""
        return LossRows(*(column[index] for column in self._columns()))

    def _columns(self) -> tuple[Any, ...]:
        numbers = self.step, self.loss, self.learning_rate, self.images_per_s, self.wait_ms, self.time_s
        return *numbers, self.metrics


@dataclass(frozen=True, eq=False)
class LossBatch:
    """The result of one call to `LossLog.read`."""

    rows: LossRows
    restarted: bool = False  # the file was replaced: rows read earlier belong to the old file
    num_unreadable: int = 0  # skipped lines that are not valid rows
    last_unreadable_line: int = 0  # its number in the file, from 1; 0 if there is none
    more: bool = False  # the file contains more than this read returned: read again at once


@dataclass(frozen=True)
class NewLines:
    """The result of one call to `GrowingLog.read`."""

    lines: Sequence[bytes] = ()  # without their newlines
    restarted: bool = False  # the file was replaced: lines read earlier belong to the old file
    is_missing: bool = False  # there is no file
    is_too_long: bool = False  # a piece of a line that is longer than a read was skipped
    more: bool = False  # the file contains more than this read returned: read again at once


class GrowingLog:
    """Reads the complete lines of a log that may still grow, from where the last read ended.

    The file is closed in between. A last line without its newline is left for the next read. A file that was replaced,
    shortened or rewritten is read from its start. A line longer than `chunk_bytes` is skipped piece by piece.

    Attributes:
        num_lines: the number of lines that were read.
    """

    def __init__(self, path: Path, chunk_bytes: int) -> None:
        self._path, self._chunk_bytes = path, chunk_bytes
        self._identity: tuple[int, int] | None = None
        self._before = b""  # what stands before the place of the next read
        self._offset = self.num_lines = 0

    def read(self) -> NewLines:
        """Read up to `chunk_bytes` of new complete lines; raise OSError if the file cannot be read."""
        try:
            file = os.fdopen(open_regular(self._path), "rb")
        except FileNotFoundError:
            return NewLines(is_missing=True)
        with file:
            restarted = self._rewind_if_another_file(file)
            file.seek(self._offset)
            chunk = file.read(self._chunk_bytes)
            is_full, stop = len(chunk) == self._chunk_bytes, chunk.rfind(b"\n") + 1
            is_too_long = is_full and stop == 0
            if is_too_long:
                self._offset = max(self._offset + len(chunk), end_of_hole(file) if not chunk.strip(b"\0") else 0)
            else:
                self._offset += stop
            begin = max(0, self._offset - _FINGERPRINT_BYTES)
            file.seek(begin)
            self._before = file.read(self._offset - begin)
        lines = chunk[:stop].split(b"\n")[:-1]
        self.num_lines += len(lines)
        return NewLines(lines, restarted, is_too_long=is_too_long, more=is_full)

    def _rewind_if_another_file(self, file: BinaryIO) -> bool:
        """Rewind if the file is not the one that was read; return True if lines of the old file were read."""
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        file.seek(self._offset - len(self._before))
        if identity == self._identity and file.read(len(self._before)) == self._before:
            return False
        restarted = self.num_lines > 0
        self._identity, self._before, self._offset, self.num_lines = identity, b"", 0, 0
        return restarted


class LossLog:
    """A reader of a `loss.jsonl` that may still grow, as `GrowingLog`. A missing file has no rows."""

    def __init__(self, path: Path, chunk_bytes: int = 1 << 18) -> None:
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}; omit it to use 256 KiB")
        self._log = GrowingLog(path, chunk_bytes)

    def read(self) -> LossBatch:
        """Read up to `chunk_bytes` of new complete lines; raise OSError if the file cannot be read."""
        new = self._log.read()
        if new.is_too_long:
            return LossBatch(NO_ROWS, new.restarted, 1, self._log.num_lines + 1, more=True)
        rows, unreadable = _parse(new.lines)
        num_before = self._log.num_lines - len(new.lines)
        last_unreadable = num_before + unreadable[-1] + 1 if unreadable else 0
        return LossBatch(rows, new.restarted, len(unreadable), last_unreadable, new.more)


def end_of_hole(file: BinaryIO) -> int:
    """Return the offset of the next data in a sparse file; holes, which can span terabytes, contain no lines."""
    here = file.tell()
    if not hasattr(os, "SEEK_DATA"):
        return here
    try:
        return os.lseek(file.fileno(), here, os.SEEK_DATA)
    except OSError:  # no data follow, or the file system does not support holes
        return max(here, os.fstat(file.fileno()).st_size)


def _parse(lines: Sequence[bytes]) -> tuple[LossRows, list[int]]:
    """Return the rows of the readable lines and the indices of the unreadable lines; ignore blank lines."""
    indices = [index for index, line in enumerate(lines) if line.strip()]
    try:
        # One call for all lines: 2 to 3 times faster than one call per line.
        values = json.loads(b"[" + b",".join([lines[index] for index in indices]) + b"]")
        if len(values) == len(indices):
            return _columns(values), []
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass  # at least one line is not a row: find it, line by line
    rows: list[dict[str, Any]] = []
    unreadable: list[int] = []
    for index in indices:
        try:
            value = json.loads(lines[index])
            _columns([value])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            unreadable.append(index)
        else:
            rows.append(value)
    return _columns(rows), unreadable


def _columns(values: Sequence[Any]) -> LossRows:
    """Arrange decoded lines in columns.

    Raises:
        ValueError, KeyError, TypeError, OverflowError: if a line is not a row.
    """
    steps = [value["step"] for value in values]
    if not set(map(type, steps)) <= {int} or (steps and not (min(steps) >= 0 and max(steps) < _MAX_STEP)):
        raise ValueError("step must be a non-negative integer")
    losses = [value["loss"] for value in values]
    if not set(map(type, losses)) <= {float, int, type(None)}:
        raise ValueError("loss must be a number or null")
    return LossRows(
        step=np.array(steps, np.int64),
        loss=np.array(losses, np.float64),
        learning_rate=_optional_column(values, "lr"),
        images_per_s=_optional_column(values, "images_per_s"),
        wait_ms=_optional_column(values, "wait_ms"),
        time_s=_optional_column(values, "time"),
        metrics=_metrics_column(values),
    )


def _metrics_column(values: Sequence[dict[str, Any]]) -> npt.NDArray[np.object_]:
    """Return the metrics of each line that are numbers, NaN where null; anything else is ignored."""
    column = np.empty(len(values), np.object_)
    for index, value in enumerate(values):
        found = value.get("metrics")
        column[index] = {
            name: float("nan") if number is None else float(number)
            for name, number in (found.items() if isinstance(found, dict) else ())
            if number is None or type(number) in (float, int)
        }
    return column


def _optional_column(values: Sequence[dict[str, Any]], name: str) -> Floats:
    numbers = [value.get(name) for value in values]
    if not set(map(type, numbers)) <= {float, int, type(None)}:
        numbers = [number if type(number) in (float, int) else None for number in numbers]
    return np.array(numbers, np.float64)  # NumPy converts None to NaN


NO_ROWS = _columns([])


@dataclass(frozen=True)
class RunFacts:
    """The values of `config.json` that `tail-run` shows; a missing value is None."""

    steps: int | None = None
    batch: int | None = None
    model: str | None = None


COMPLETE_ENDS = ("steps", "top1", "patience")
"""What ends a run that is complete: its last step, or an evaluation (`stop_at_top1`, `stop_patience`)."""
_END_WORDS = {
    "steps": "done",
    "top1": "done, top-1 reached",
    "patience": "done, no better evaluation in time (--stop-patience)",
    "callback": "stopped by a callback",
    "KeyboardInterrupt": "stopped at once by Ctrl-C",
    "error": "failed",
}


def end_words(stopped_by: str) -> str:
    """Return how a run ended, in words; `stopped_by` is as in a `TrainResult`."""
    return _END_WORDS.get(stopped_by, f"stopped by {stopped_by}")


@dataclass(frozen=True)
class RunEnd:
    """The values of `result.json` that `tail-run` shows; a missing value is None."""

    steps_done: int | None = None
    stopped_by: str | None = None
    error: str | None = None

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> "RunEnd":
        """Return what the content of a `result.json` says; a value of another type is None."""
        return cls(_count(result.get("steps_done")), _text(result.get("stopped_by")), _text(result.get("error")))

    @property
    def outcome(self) -> Literal["done", "failed", "stopped"]:
        """How the run ended, in a word."""
        if self.error is not None or self.stopped_by == "error":
            return "failed"
        return "done" if self.stopped_by in COMPLETE_ENDS else "stopped"

    def line(self, planned: int | None = None) -> str:
        """Return a printable line such as `run stopped by SIGTERM after 7 of 12 steps`; planned steps if it stopped."""
        words = "ended" if self.stopped_by is None else end_words(self.stopped_by)
        text = f"run {'failed' if self.outcome == 'failed' else words}"
        if self.steps_done is not None:
            steps = quantity(self.steps_done, "step")
            if planned is not None and self.outcome == "stopped":
                steps = f"{self.steps_done:,} of {quantity(planned, 'step')}"
            text += f"{',' * (',' in text)} after {steps}"
        return printable_line(text if self.error is None else f"{text}: {self.error}")


def read_last_rows(path: Path, most_rows: int) -> LossRows | None:
    """Return the rows of the last complete lines of a loss log, at most `most_rows` and those of its last megabyte.

    Returns:
        The rows, none if there is no log yet; None if the last line is not a row.

    Raises:
        OSError: if the log exists but cannot be read.
    """
    try:
        file = os.fdopen(open_regular(path), "rb")
    except FileNotFoundError:
        return NO_ROWS
    with file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LONGEST_LINE_BYTES))
        lines = file.read(LONGEST_LINE_BYTES).split(b"\n")[:-1]
    rows, unreadable = _parse(lines[-most_rows:])
    is_broken = len(lines[-most_rows:]) - 1 in unreadable
    return None if is_broken else rows


def last_logged_step(path: Path) -> int | None:
    """Return the step of the last complete line of a loss log; None if there is no log or that line is not a row.

    Raises:
        OSError: if the log exists but cannot be read.
    """
    rows = read_last_rows(path, 1)
    return int(rows.step[-1]) if rows is not None and len(rows) else None


def read_run_facts(run: Path) -> RunFacts:
    """Read the values that `tail-run` shows from `RUN/config.json`; a missing or unreadable value becomes None."""
    recorded = _read_object(run / CONFIG_NAME) or {}
    settings, resolved = (_object(recorded.get(key)) for key in ("config", "resolved"))
    model = _text(resolved.get("model")) or _text(settings.get("model"))  # the resolved model replaces "auto"
    return RunFacts(_count(settings.get("steps")), _count(settings.get("batch")), model)


def read_run_end(run: Path) -> RunEnd | None:
    """Return how a run ended, or None if `RUN/result.json` is missing, incomplete or from before RUN was locked.

    While a resumed run is in progress, the file may still contain the end of an earlier launch.
    """
    # Looked at first, so that the content is as new, or newer.
    is_earlier = is_leftover(run, RESULT_NAME)
    result = _read_object(run / RESULT_NAME)
    if result is None or is_earlier:
        return None
    return RunEnd.of(result)


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(read_regular(path, max_bytes=MOST_JSON_BYTES))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
