"""Reads `RUN/eval.jsonl` while it grows.

Owns what counts as a readable evaluation. Must not know: terminals, jax, how an evaluation is computed.
"""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from loopfeed.engine.records.limits import LONGEST_LINE_BYTES
from loopfeed.engine.records.loss_log import end_of_hole
from loopfeed.engine.stream.sinks import EvaluationRecord
from loopfeed.preprocess.regular_file import open_regular

_MAX_COUNT = 2**53  # above it a float64 is no longer exact
_FINGERPRINT_BYTES = 128  # the end of a line carries its time, so two launches differ within this many bytes


class EvaluationLog:
    """A reader of an `eval.jsonl` that may still grow; it keeps no file open between reads.

    Each read goes on where the last one ended, line by line, so that the log may be larger than the memory. A last line
    without its newline is left for a later read; a line that is not an evaluation, or too long for one, is skipped. A
    file that was replaced, cut or written again is read from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state: tuple[int, int, int] | None = None
        self._restart()

    def _restart(self) -> None:
        self._offset, self._before, self._records = 0, b"", tuple[EvaluationRecord, ...]()

    def read(self) -> tuple[EvaluationRecord, ...]:
        """Return all evaluations so far in file order, or `()` if there is no file; raise OSError if reading fails.

        Lists among the metrics, which can be large, are those of the newest evaluation alone.
        """
        try:
            file = os.fdopen(open_regular(self._path), "rb")
        except FileNotFoundError:
            self._state = None
            self._restart()
            return self._records
        with file:
            status = os.fstat(file.fileno())
            state = status.st_ino, status.st_size, status.st_mtime_ns
            if state != self._state:
                is_same = self._state is not None and self._state[0] == status.st_ino
                if not is_same or not self._goes_on(file):
                    self._restart()
                self._read_new(file)
                self._state = state
        return self._records

    def _goes_on(self, file: BinaryIO) -> bool:
        """Return whether the file still has what was read before its newest lines."""
        file.seek(self._offset - len(self._before))
        return file.read(len(self._before)) == self._before

    def _read_new(self, file: BinaryIO) -> None:
        found: list[EvaluationRecord] = []
        file.seek(self._offset)
        while (line := _read_line(file)) is not None:
            record = _parse(line)
            if record is not None:
                if found:
                    found[-1] = found[-1].without_lists()
                found.append(record)
            self._offset = file.tell()
        begin = max(0, self._offset - _FINGERPRINT_BYTES)
        file.seek(begin)
        self._before = file.read(self._offset - begin)
        if found:
            last = tuple(each.without_lists() for each in self._records[-1:])
            self._records = (*self._records[:-1], *last, *found)


def _read_line(file: BinaryIO) -> bytes | None:
    """Return the next complete line, its end alone if it is longer than any line of a log; None if there is none."""
    while not (line := file.readline(LONGEST_LINE_BYTES)).endswith(b"\n"):
        if not line:
            return None
        if not line.strip(b"\0"):
            file.seek(end_of_hole(file))
    return line


def _parse(line: bytes) -> EvaluationRecord | None:
    """Parse a line; return None if it is not an evaluation. A missing or null time or loss becomes NaN."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    step, num_images = value.get("step"), value.get("num_images")
    if not (_is_count(step) and _is_count(num_images)):
        return None
    top1, top5, loss, time_s = (_number(value.get(name)) for name in ("top1", "top5", "loss", "time"))
    has_top1, has_top5 = (value.get(name) is not None for name in ("top1", "top5"))
    # Below six classes there is no top-5, and without classes there is neither.
    if ((has_top1 or has_top5) and not 0 <= top1 <= 1) or (has_top5 and not 0 <= top5 <= 1):
        return None
    metrics = value.get("metrics")
    return EvaluationRecord(
        step=step,
        num_images=num_images,
        top1=top1,
        top5=top5,
        loss=loss,
        time=time_s,
        metrics=metrics if isinstance(metrics, dict) else {},
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _number(value: Any) -> float:
    return float(value) if type(value) is float or _is_count(value) else float("nan")
